"""KiRAG: retrieval along a reasoning chain of knowledge triples."""
