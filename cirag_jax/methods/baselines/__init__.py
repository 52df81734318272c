"""The baselines that the papers compare with, one file each."""
