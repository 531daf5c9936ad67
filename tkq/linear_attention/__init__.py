"""Linear attention and state space models: one chunked engine. Users call tkq.linear_attn, with the delta rule
tkq.gated_delta_rule, and tkq.mamba2_ssd."""
