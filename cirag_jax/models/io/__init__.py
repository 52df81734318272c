"""Weights in and out: hub folders, GGUF, PEFT, checkpoints, training workdirs."""
