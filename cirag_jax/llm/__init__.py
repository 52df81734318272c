"""Language-model backends behind one protocol: the JAX engine, OpenAI-compatible servers, torch."""
