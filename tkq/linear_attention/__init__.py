"""Linear attention and state space models: one chunked engine. Users call tkq.linear_attn, with the delta rule
tkq.gated_delta_rule, tkq.mamba2_ssd, and tkq.based."""
