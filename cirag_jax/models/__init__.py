"""Encoders, their checkpoints and their export."""
