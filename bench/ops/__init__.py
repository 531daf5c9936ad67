"""The cases of each operation: `python -m bench.ops.norms` runs one file."""
