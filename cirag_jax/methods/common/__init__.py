"""Reading, evidence, extraction and parsing, shared by the methods."""
