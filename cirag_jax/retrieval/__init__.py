"""Encoding texts and searching them."""
