"""Attention's backward in plain PyTorch: what it means. The path of CPU tensors, and the oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
import math
from typing import Optional

import torch
from torch import Tensor


def seen(rows: int, keys: int, causal: bool = False, window_size=(None, None), device=None) -> Tensor:
    """(rows, keys) bool: query i is aligned with key i + keys - rows and sees from window_size[0] keys before it to
    window_size[1] behind it, inclusive; None: no limit. causal: nothing behind it."""
    left, right = window_size
    right = 0 if causal else right
    distance = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None] - (keys - rows)
    out = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if left is not None:
        out &= distance >= -left
    if right is not None:
        out &= distance <= right
    return out


def flash_attn_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                        dlse: Optional[Tensor] = None, causal: bool = False, softmax_scale: Optional[float] = None,
                        window_size=(None, None)) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of o = softmax(scale * q @ k.T) @ v and of lse, the log-sum-exp of its rows.

    do, q, o (B, Sq, H, D), k, v (B, Sk, Hk, D), lse, dlse (B, H, Sq). With P = exp(scale * q @ k.T - lse):
    dv = P.T @ do, dS = P * (do @ v.T - rowsum(o * do) + dlse), dq = scale * dS @ k, dk = scale * dS.T @ q; dk and dv
    are summed over the query heads of a K/V head. A row that sees no key has no gradient."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    (_, rows, heads, dim), (_, keys, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads if kv_heads else 1
    wq, wo, wdo = (x.to(wide).transpose(1, 2) for x in (q, o, do))
    wk, wv = (x.to(wide).transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    lse = lse.to(wide)
    logits = (wq @ wk.transpose(-1, -2) * scale).masked_fill(
        ~seen(rows, keys, causal, window_size, q.device), -math.inf)
    p = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    minus = (wo * wdo).sum(-1) if dlse is None else (wo * wdo).sum(-1) - dlse.to(wide)
    ds = p * (wdo @ wv.transpose(-1, -2) - minus.masked_fill(lse == -math.inf, 0.0)[..., None])
    dq = (ds @ wk * scale).transpose(1, 2)
    dk, dv = (x.unflatten(1, (kv_heads, group)).sum(2).transpose(1, 2) if kv_heads else x.transpose(1, 2)
              for x in (ds.transpose(-1, -2) @ wq * scale, p.transpose(-1, -2) @ wdo))
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()
