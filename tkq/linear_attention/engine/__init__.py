"""The kernel that goes from chunk to chunk, which `linear_attn`, `gated_delta_rule` and `mamba2_ssd` share, and its
parts."""
