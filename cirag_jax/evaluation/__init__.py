"""How good a retriever is: recall, next-unit ranking, paired bootstrap."""
