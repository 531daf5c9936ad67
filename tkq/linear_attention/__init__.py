"""Linear attention and state space models: one chunked engine (`engine`), and kernels of their own for gates of columns
(`channels`), Based and Hedgehog. Users call tkq.linear_attn, tkq.gated_delta_rule, tkq.mamba2_ssd, tkq.based,
tkq.hedgehog and the steps."""
