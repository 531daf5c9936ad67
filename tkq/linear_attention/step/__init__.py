"""One token, or a few, of linear attention and state spaces: states in a pool, which are updated in place. Users call
tkq.linear_attn_step, tkq.gated_delta_rule_step and tkq.ssd_step."""
