"""Metrics of answers, retrieval and trained components, with confidence intervals."""
