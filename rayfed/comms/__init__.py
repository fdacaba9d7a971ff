"""Encoding of messages and the count of their bytes."""
