"""Attention of float8 q, k and v, forward only: the kernels of ``tkq.flash_attn_fp8``."""
