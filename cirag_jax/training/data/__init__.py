"""Training examples and batches for all trainers."""
