"""Requests, a scheduler that batches them across questions, and a journal that records them."""
