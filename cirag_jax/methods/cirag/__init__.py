"""CIRAG: iterative construction-integration, then adaptive cascaded generation."""
