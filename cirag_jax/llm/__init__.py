"""Language-model backends with one protocol: the JAX engine, OpenAI-compatible servers, PyTorch."""
