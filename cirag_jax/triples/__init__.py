"""Triples: their normal form, where they come from, the store."""
