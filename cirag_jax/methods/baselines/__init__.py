"""Baselines of the papers, one file each."""
