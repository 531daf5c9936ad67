"""Backward passes in plain PyTorch: what they mean. The path of CPU tensors, and an oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
from typing import Optional

from torch import Tensor

from .reference import _wide


def norm_backward(kind: str, dy: Tensor, x: Tensor, weight: Optional[Tensor], rstd: Tensor,
                  mean: Optional[Tensor] = None, dresidual_out: Optional[Tensor] = None,
                  weight_offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """dx (with dresidual_out added), dweight and dbias of rmsnorm or layernorm over the rows of x (M, N), unrounded.

    kind: "rmsnorm" or "layernorm". rstd, mean: (M,), what the forward divided by and subtracted."""
    dy, wide = _wide(dy), _wide(x)
    centred = wide - mean.to(wide.dtype)[:, None] if kind == "layernorm" else wide
    hat = centred * rstd.to(wide.dtype)[:, None]
    g = dy if weight is None else dy * (_wide(weight) + weight_offset)
    dx = g - hat * (g * hat).mean(-1, keepdim=True)
    if kind == "layernorm":
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd.to(wide.dtype)[:, None]
    if dresidual_out is not None:
        dx = dx + _wide(dresidual_out)
    return dx, (dy * hat).sum(0), dy.sum(0)
