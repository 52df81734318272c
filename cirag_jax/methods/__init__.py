"""Question-answering methods. Each is a generator that yields requests and gets their results."""
