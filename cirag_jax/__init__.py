"""Multi-hop question answering with knowledge triples, trained in JAX."""
