"""Decoding of multi-head latent attention (MLA), absorbed: one latent row a token serves all heads as key and value."""
