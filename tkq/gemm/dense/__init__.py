"""Products of 16 bits: spec, plan, config, kernels."""
