"""Messages and parsers of every method: pure Python, no model."""
