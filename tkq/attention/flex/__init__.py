"""Attention with scores and masks of the user's own: traced functions, block lists, kernels."""
