"""CIRAG: iterative construction and integration, then cascaded answering."""
