"""From documents to triples: extraction, parsing, provenance, the triple store."""
