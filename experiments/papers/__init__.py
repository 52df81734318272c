"""Declarations of the tables and figures of the papers, which experiments/run.py runs."""
