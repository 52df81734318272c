"""Question-answering methods, as generators that yield requests and receive their results."""
