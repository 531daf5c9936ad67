"""Files with a main of their own: models, cold starts, clocks, the docs' kernels."""
