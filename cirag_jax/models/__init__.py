"""Encoders, decoders and adapters in JAX; `models.io` reads and writes their files."""
