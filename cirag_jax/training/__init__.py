"""Training loops, one file for each component, and what they share."""
