"""Matrix products: spec and plan (pure Python), the kernels, and the function that PyTorch calls."""
