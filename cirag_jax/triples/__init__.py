"""Triples: normal forms, an index of entities, and the store of extracted triples."""
