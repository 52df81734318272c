"""Reads and writes models: hub folders, GGUF, PEFT, checkpoints and training workdirs."""
