"""Backward passes in plain PyTorch: what they mean. The path of CPU tensors, and an oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
from typing import Optional

from torch import Tensor

from .precision import _upcast


def norm_backward(kind: str, dy: Tensor, x: Tensor, weight: Optional[Tensor], rstd: Tensor,
                  mean: Optional[Tensor] = None, dresidual_out: Optional[Tensor] = None,
                  weight_offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """dx (with dresidual_out added), dweight and dbias of rmsnorm or layernorm over the last dimension, unrounded.

    kind: "rmsnorm" or "layernorm". dy, x, dresidual_out: (..., N). weight: (N,), or (H, N) where x is (..., H, N); the
    sums for dweight and dbias have its shape. rstd, mean: one number a row, what the forward divided by and
    subtracted."""
    dy, wide, rows = _upcast(dy), _upcast(x), (*x.shape[:-1], 1)
    rstd = rstd.to(wide.dtype).view(rows)
    hat = (wide - mean.to(wide.dtype).view(rows) if kind == "layernorm" else wide) * rstd
    g = dy if weight is None else dy * (_upcast(weight) + weight_offset)
    dx = g - hat * (g * hat).mean(-1, keepdim=True)
    if kind == "layernorm":
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd
    if dresidual_out is not None:
        dx = dx + _upcast(dresidual_out)
    summed = tuple(range(x.dim() - (1 if weight is None else weight.dim())))
    return dx, _sum(dy * hat, summed), _sum(dy, summed)


def _sum(t, dims):
    return t.sum(dims) if dims else t  # torch takes no dimensions for all
