"""The generation engine in JAX."""
