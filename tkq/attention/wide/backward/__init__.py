"""The gradients of attention with wide heads: three passes, each of which has one gradient's tile in registers."""
