"""From torch tensors to a launch."""
