"""Convolutions along the tokens: `tkq.causal_conv1d`."""
