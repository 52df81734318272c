"""C2RAG: constraints checked against a graph of triples, and text where the graph has gaps."""
