"""Products of float8 with scales: spec, plan, config, kernels."""
