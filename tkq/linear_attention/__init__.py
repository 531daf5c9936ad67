"""Linear attention and state space models: one chunked engine."""
