"""Hedgehog (LoLCATS): softmax attention within a window, linear attention of softmax features before it, one
denominator."""
