"""Elementwise kernels: rotary embedding, and the gated activations SwiGLU and GeGLU."""
