"""Linear attention whose outputs lie in accumulators token by token, with the state in shared memory beside them."""
