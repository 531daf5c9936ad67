"""Attention in float8 in plain PyTorch: what it means. The path of CPU tensors, and the oracle of the tests."""
from typing import Optional

import torch
from torch import Tensor

from tkq.reference.attention import flash_attn
from tkq.reference.fp8 import LARGEST, SMALLEST_SCALE, narrowed

E4M3 = torch.float8_e4m3fn


def flash_attn_fp8(q: Tensor, k: Tensor, v: Tensor, q_descale: Optional[Tensor] = None,
                   k_descale: Optional[Tensor] = None, v_descale: Optional[Tensor] = None, causal: bool = False,
                   softmax_scale: Optional[float] = None, left: int = -1, right: int = -1,
                   out_dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """``flash_attn`` of float8 tensors, each multiplied by its descale (B, Hk) or 1, q by that of the K/V head that it
    belongs to: o of out_dtype, and lse float32. out_dtype float64: computed in it. Probabilities are not rounded."""
    wide, group = torch.promote_types(out_dtype, torch.float32), q.shape[2] // k.shape[2] if k.shape[2] else 1
    factors = [None if x is None else x.to(wide)[:, None, :, None] for x in (q_descale, k_descale, v_descale)]
    if q_descale is not None:
        factors[0] = factors[0].repeat_interleave(group, 2)
    q, k, v = (x.to(wide) if by is None else x.to(wide) * by for x, by in zip((q, k, v), factors))
    o, lse = flash_attn(q, k, v, causal, softmax_scale, left, right)
    return o.to(out_dtype), lse


def quantize_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple:
    """(q, k, v in e4m3, and their descales (B, Hk) float32): each divided by the largest magnitude of its sequence and
    K/V head / 448; of query heads by that of all that belong to one K/V head."""
    made, descales = [], []
    for x in (q, k, v):
        B, rows, heads, D = x.shape
        wide = x.float().reshape(B, rows, k.shape[2], heads // max(k.shape[2], 1), D)
        largest = wide.abs().amax((1, 3, 4)) if wide.numel() else wide.new_zeros(B, k.shape[2])
        descales.append((largest * (1.0 / LARGEST[E4M3])).clamp_min(SMALLEST_SCALE))
        made.append(narrowed(wide / descales[-1][:, None, :, None, None], E4M3).view(x.shape))
    return *made, *descales
