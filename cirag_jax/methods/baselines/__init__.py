"""The baselines of the papers, one per file."""
