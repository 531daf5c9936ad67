"""Decoding of a few queries over a float8 cache without shared memory: words of rows go straight into registers."""
