"""Sums from each token to the last: of what gates' gradients are made of."""
