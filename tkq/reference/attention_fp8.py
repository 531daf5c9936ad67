"""Attention in float8 in plain PyTorch: what it means. The path of CPU tensors, and the oracle of the tests."""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq.reference.attention import flash_attn, sequences
from tkq.reference.fp8 import LARGEST, SMALLEST_SCALE, narrowed
from tkq.reference.pointwise import rope

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


def flash_attn_fp8_varlen(q: Tensor, k: Tensor, v: Tensor, q_descale: Optional[Tensor], k_descale: Optional[Tensor],
                          v_descale: Optional[Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                          seqused_q: Optional[Tensor] = None, seqused_k: Optional[Tensor] = None,
                          block_table: Optional[Tensor] = None, causal: bool = False,
                          softmax_scale: Optional[float] = None, left: int = -1, right: int = -1,
                          out_dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """``flash_attn_fp8`` of each sequence: rows cu_seqlens_q[s] .. cu_seqlens_q[s + 1] of q (total_q, H, D) with rows
    cu_seqlens_k[s] .. of k and v, and its own descales (B, Hk); of each only the first seqused_q[s], seqused_k[s]. o
    (total_q, H, D), lse (H, total_q). Rows of no sequence, and those not in use, are rows that see no key. Other
    numbers: see ``tkq.reference.attention.sequences``. block_table: keys are the first seqused_k[s] of ``of_pages``."""
    if block_table is not None:
        k, v, cu_seqlens_k = of_pages(k, v, block_table)
    o = q.new_zeros(q.shape, dtype=out_dtype)
    wide = torch.promote_types(out_dtype, torch.float32)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=wide, device=q.device)
    for s, ((a, b), (c, d)) in enumerate(zip(sequences(cu_seqlens_q, seqused_q, q.shape[0]),
                                             sequences(cu_seqlens_k, seqused_k, k.shape[0]))):
        if b > a:
            own = [None if x is None else x[s:s + 1] for x in (q_descale, k_descale, v_descale)]
            one, one_lse = flash_attn_fp8(q[None, a:b], k[None, c:d], v[None, c:d], *own, causal, softmax_scale, left,
                                          right, out_dtype)
            o[a:b], lse[:, a:b] = one[0], one_lse[0]
    return o, lse


def of_pages(k: Tensor, v: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(k, v, cu_seqlens_k) of sequences of whole pages, one behind the other. Of a page that is not there keys are NaN
    and values 0."""
    (pages, page), (B, n) = k.shape[:2], block_table.shape
    there = ((block_table >= 0) & (block_table < pages))[:, :, None, None, None].to(k.device)
    at = block_table.clamp(0, max(pages - 1, 0)).long().flatten() if pages else block_table.new_empty(0).long()
    found = []
    for x, other in ((k, 0x7F), (v, 0)):
        x = x.view(torch.uint8) if x.stride(3) == 1 else x.contiguous().view(torch.uint8)
        x = x[at].view(B, n if pages else 0, page, *k.shape[2:])
        found.append(torch.where(there[:, :x.shape[1]], x, other).to(torch.uint8).flatten(0, 2).view(E4M3))
    cu = torch.arange(B + 1, device=k.device) * (page * n if pages else 0)
    return *found, cu.int()


def rotated(x: Tensor) -> Tensor:
    """Rows times the orthonormal Hadamard matrix of their length, a power of 2: by butterflies."""
    width, step = x.shape[-1], 1
    while step < width:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x, step = torch.stack((a + b, a - b), -2).reshape(x.shape), 2 * step
    return x * width ** -0.5


def before_quantized(q: Tensor, k: Tensor, cos: Optional[Tensor] = None, sin: Optional[Tensor] = None,
                     rotate: bool = False, smooth_k: bool = False, wide: torch.dtype = torch.float32) -> tuple:
    """q and k as ``quantize_qkv`` rounds them: at their positions, k without the mean of its tokens, rotated."""
    q, k = q.to(wide), k.to(wide)
    if cos is not None:
        q, k = (rope(x, cos.to(wide), sin.to(wide)) for x in (q, k))
    if smooth_k and k.shape[1]:
        k = k - k.double().mean(1, keepdim=True).to(wide)
    return (rotated(q), rotated(k)) if rotate else (q, k)


def quantize_qkv(q: Tensor, k: Tensor, v: Tensor, cos: Optional[Tensor] = None, sin: Optional[Tensor] = None,
                 rotate: bool = False, smooth_k: bool = False) -> tuple:
    """(q, k, v in e4m3, and their descales (B, Hk) float32): each divided by the largest magnitude of its sequence and
    K/V head / 448; of query heads by that of all that belong to one K/V head. The options: ``before_quantized``."""
    made, descales, heads_kv = [], [], k.shape[2]
    for x in (*before_quantized(q, k, cos, sin, rotate, smooth_k), v):
        B, rows, heads, D = x.shape
        wide = x.float().reshape(B, rows, heads_kv, heads // max(heads_kv, 1), D)
        largest = wide.abs().amax((1, 3, 4)) if wide.numel() else wide.new_zeros(B, heads_kv)
        descales.append((largest * (1.0 / LARGEST[E4M3])).clamp_min(SMALLEST_SCALE))
        made.append(narrowed(wide / descales[-1][:, None, :, None, None], E4M3).view(x.shape))
    return *made, *descales
