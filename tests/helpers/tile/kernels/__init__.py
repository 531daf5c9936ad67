"""Small kernels, one family a file, that exercise the tile layer: compiled by tests/cpu, run by tests/gpu.

Every builder returns (jit callable, fake arguments), as ``tkq.runtime.Recipe`` wants it.
"""
