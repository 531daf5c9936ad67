"""To float8 with scales: spec and plan (pure Python), the kernels, and the function that PyTorch calls."""
