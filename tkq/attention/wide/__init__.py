"""Attention with heads of 264 to 512 columns: the kernel of ``tkq.flash_attn`` beyond ``tkq.attention.forward``."""
