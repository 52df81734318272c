"""C2RAG: constraints grounded in a graph of triples, or in text if the graph is insufficient."""
