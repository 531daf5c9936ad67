"""Attention of a few queries over a cache of keys and values: `tkq.flash_attn_with_kvcache` and what goes with it."""
