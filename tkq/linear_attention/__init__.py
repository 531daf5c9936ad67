"""Linear attention and state space models: one chunked engine. tkq.linear_attn is the function that users call; the
delta rule (`delta.py`) is a part of the kernel without one yet."""
