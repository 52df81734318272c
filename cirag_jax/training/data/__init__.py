"""Batches of every trainer."""
