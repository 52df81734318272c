"""Training loops, one file per component, and the code that they share."""
