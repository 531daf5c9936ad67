"""Decays for each column of k from what a layer's projection gives."""
