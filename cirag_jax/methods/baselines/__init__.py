"""The baselines that the papers compare with, one per file."""
