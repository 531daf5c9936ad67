"""The gradients of attention with a score function and a mask of the user's own."""
