"""Requests, the scheduler that batches them across questions, the journal that records them."""
