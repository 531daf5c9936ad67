"""The norms with all their options, their gradients and their float8 forms, in plain PyTorch: what they mean.

The path of CPU tensors, and the oracle of the tests. Computed in float32 (float64 stays float64), rounded once at the
end. Clear rather than fast.
"""
from typing import Optional

import torch
from torch import Tensor

from . import norms_backward
from .precision import _upcast

E4M3_LARGEST = 448.0
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32
GROUP = 128


def norm(kind: str, x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None,
         residual: Optional[Tensor] = None, *, eps: float, weight_offset: float = 0.0):
    """(y, h, rstd, mean), all wide: y = (h - mean) * rstd * (weight + weight_offset) + bias for h = x + residual.

    kind: "rmsnorm" (mean is None) or "layernorm". weight: (N,), or (H, N) for x (..., H, N). rstd, mean: (rows,)."""
    h = _upcast(x) if residual is None else _upcast(x) + _upcast(residual)
    rstd, mean = _statistics(kind, h, eps)
    y = (h if mean is None else h - mean) * rstd
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y, h, rstd.reshape(-1), None if mean is None else mean.reshape(-1)


def statistics(kind: str, h: Tensor, eps: float):
    """(rstd, mean) of the rows of h, (rows,); mean is None for rmsnorm. `norm_backward` takes those of h as it reads h:
    where a sum is stored rounded, they are not those of `norm`, which has the sum itself."""
    rstd, mean = _statistics(kind, _upcast(h), eps)
    return rstd.reshape(-1), None if mean is None else mean.reshape(-1)


def _statistics(kind, h, eps):
    mean = h.mean(-1, keepdim=True) if kind == "layernorm" else None
    if mean is not None:  # what rounding left in it: a row of one number has just that for its mean
        mean = mean + (h - mean).mean(-1, keepdim=True)
    centred = h if mean is None else h - mean
    return torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps), mean


def norm_backward(kind: str, dy: Tensor, x: Tensor, weight: Optional[Tensor], rstd: Tensor,
                  mean: Optional[Tensor] = None, *, dresidual_out: Optional[Tensor] = None, weight_offset: float = 0.0,
                  needs=(True, True, True), dx_dtype: Optional[torch.dtype] = None,
                  dresidual_dtype: Optional[torch.dtype] = None, dbias_dtype: Optional[torch.dtype] = None):
    """(dx, dweight, dbias, dresidual) of `norm`, None for what is not needed.

    x: what was normalised (x + residual). dresidual_out: the gradient of that sum as a result of its own.
    needs: of dx, dweight and dbias. dx_dtype: x's where not given. dresidual_dtype: where given, dx in it too.
    dbias_dtype: the weight's where not given, or x's."""
    dx, dweight, dbias = norms_backward.norm_backward(kind, dy, x, weight, rstd, mean, dresidual_out, weight_offset)
    dresidual = None if dresidual_dtype is None else dx.to(dresidual_dtype, copy=True)
    return (dx.to(dx_dtype or x.dtype) if needs[0] else None, dweight.to(weight.dtype) if needs[1] else None,
            dbias.to(dbias_dtype or (x if weight is None else weight).dtype) if needs[2] else None, dresidual)


def quantise(y: Tensor, granularity: str):
    """(q, scale) with y ~ q * scale, for y (M, N): q in float8_e4m3fn.

    scale = max(amax / 448, 2^-126) in float32, of each row (M, 1) or of each 128 columns of a row (M, ceil(N / 128)).
    Where amax is NaN, scale and q are; where it is infinite, scale is, and q is 0, or NaN for the infinite elements."""
    M, N = y.shape
    groups = 1 if granularity == "row" else -(-N // GROUP)
    width = N if granularity == "row" else GROUP
    padded = torch.nn.functional.pad(_upcast(y), (0, groups * width - N)).view(M, groups, width)
    scale = (padded.abs().amax(-1, keepdim=True) / E4M3_LARGEST).clamp_min(SMALLEST_SCALE)
    q = (padded / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    return q.view(M, groups * width)[:, :N].contiguous(), scale.view(M, groups).float()
