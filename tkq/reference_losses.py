"""Softmax and the losses in plain PyTorch, forward and backward: what the ops mean, as tkq.reference has it for others.

Computed in float32 (float64 stays float64), rounded once at the end.
"""
import torch
from torch import Tensor

from .reference import _wide


def softmax(x: Tensor, scale: float = 1.0, log: bool = False) -> Tensor:
    """softmax(scale * x) over the last dimension, or its logarithm."""
    z = _wide(x) * scale
    return (torch.log_softmax(z, -1) if log else torch.softmax(z, -1)).to(x.dtype)


def softmax_backward(y: Tensor, dy: Tensor, scale: float = 1.0, log: bool = False) -> Tensor:
    """The gradient of x, from the output and its gradient."""
    w, g = _wide(y), _wide(dy)
    dx = g - w.exp() * g.sum(-1, keepdim=True) if log else w * (g - (g * w).sum(-1, keepdim=True))
    return (dx * scale).to(y.dtype)
