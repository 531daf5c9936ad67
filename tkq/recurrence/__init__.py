"""Recurrences along the tokens: `tkq.scan`."""
