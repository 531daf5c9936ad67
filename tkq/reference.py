"""Every op in plain PyTorch: what it means. The path of CPU tensors, and the oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
import math
from typing import Optional

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rmsnorm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight + bias over the last dimension (Zhang and Sennrich, 2019)."""
    w = _wide(x)
    y = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    return _affine(y, weight, bias).to(x.dtype)


def layernorm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, var the mean of (x - mean)^2 (Ba et al.,
    2016)."""
    w = _wide(x)
    centred = w - w.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return _affine(y, weight, bias).to(x.dtype)


def _affine(y, weight, bias):
    y = y if weight is None else y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def gemm(a: Tensor, b: Tensor, out_dtype: Optional[torch.dtype] = None) -> Tensor:
    """a @ b, accumulated in float32."""
    return (_wide(a) @ _wide(b)).to(out_dtype or a.dtype)


def flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool = False,
               softmax_scale: Optional[float] = None) -> tuple[Tensor, Tensor]:
    """softmax(scale * q @ k.T) @ v for q (B, Sq, H, D), k and v (B, Sk, Hk, D): o like q, and lse (B, H, Sq) float32.

    causal aligns the last query with the last key. A row that sees no key gives 0, and -inf for lse."""
    wide = [_wide(x).transpose(1, 2) for x in (q, k, v)]
    group = q.shape[2] // k.shape[2] if k.shape[2] else 1
    wq, wk, wv = wide[0], wide[1].repeat_interleave(group, 1), wide[2].repeat_interleave(group, 1)
    rows, keys = q.shape[1], k.shape[1]
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = wq @ wk.transpose(-1, -2) * scale
    if causal:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1) if keys else scores.new_full(scores.shape[:-1], -math.inf)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return (p @ wv).transpose(1, 2).to(q.dtype).contiguous(), lse.float()
