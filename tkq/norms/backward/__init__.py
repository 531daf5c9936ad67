"""Gradients of norms."""
