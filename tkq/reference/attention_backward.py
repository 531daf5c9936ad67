"""Attention's backward in plain PyTorch: what it means. The path of CPU tensors, and the oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq.reference.attention import sequences as rows_of
from tkq.reference.attention import visible
from tkq.runtime.call import autocast


def seen(rows: int, keys: int, causal: bool = False, window_size=(None, None), device=None) -> Tensor:
    """(rows, keys) bool: ``visible``, with a window_size as ``tkq.flash_attn`` takes it."""
    left, right = (-1 if side is None else side for side in window_size)
    found = visible(rows, keys, 0 if causal else right, left, device)
    return torch.ones(rows, keys, dtype=torch.bool, device=device) if found is None else found


@autocast.apart
def flash_attn_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                        dlse: Optional[Tensor] = None, causal: bool = False, softmax_scale: Optional[float] = None,
                        window_size=(None, None), softcap: float = 0.0, sinks: Optional[Tensor] = None):
    """dq, dk, dv and, where there are sinks, dsinks of o = softmax(logits) @ v and of lse, the log-sum-exp of its rows.

    q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), o, do (B, Sq, H, Dv), lse, dlse (B, H, Sq), sinks (H,). logits
    are x = scale * q @ k.T, or softcap * tanh(x / softcap). With P = exp(logits - lse): dv = P.T @ do,
    dS = P * (do @ v.T - rowsum(o * do) + dlse), times the logits' derivative, dq = scale * dS @ k,
    dk = scale * dS.T @ q; dk and dv are summed over the query heads of a K/V head. A row that sees no key has no
    gradient."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    (_, rows, heads, dim), (_, keys, kv_heads, _) = q.shape, k.shape
    group = heads // kv_heads if kv_heads else 1
    wq, wo, wdo = (x.to(wide).transpose(1, 2) for x in (q, o, do))
    wk, wv = (x.to(wide).transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    lse = lse.to(wide)
    logits, slope = capped(wq @ wk.transpose(-1, -2) * scale, softcap)
    logits = logits.masked_fill(~seen(rows, keys, causal, window_size, q.device), -math.inf)
    p = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    of_rows = -(wo * wdo).sum(-1) if dlse is None else dlse.to(wide) - (wo * wdo).sum(-1)
    of_rows = of_rows.masked_fill(lse == -math.inf, 0.0)
    ds = p * (wdo @ wv.transpose(-1, -2) + of_rows[..., None]) * slope
    dq = (ds @ wk * scale).transpose(1, 2)
    dk, dv = (x.unflatten(1, (kv_heads, group)).sum(2).transpose(1, 2) if kv_heads else x.transpose(1, 2)
              for x in (ds.transpose(-1, -2) @ wq * scale, p.transpose(-1, -2) @ wdo))
    found = dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()
    return found if sinks is None else (*found, sinks_gradient(sinks, lse, of_rows))


@autocast.apart
def flash_attn_varlen_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
                               dlse: Optional[Tensor], sequences: tuple, options: tuple, sinks: Optional[Tensor]):
    """dq, dk, dv, dsinks (or None): ``flash_attn_backward`` of each sequence; 0 for rows that are not in use.

    q (total_q, H, D), k, v (total_k, Hk, ..), lse, dlse (H, total_q). sequences: (cu_seqlens_q, cu_seqlens_k,
    seqused_q, seqused_k). options: (causal, softmax_scale, left, right, softcap)."""
    causal, scale, left, right, softcap = options
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float64)
    cu_q, cu_k, used_q, used_k = sequences
    for (a, b), (c, d) in zip(rows_of(cu_q, used_q, q.shape[0]), rows_of(cu_k, used_k, k.shape[0])):
        rows, keys = slice(a, b), slice(c, d)
        found = flash_attn_backward(do[None, rows], q[None, rows], k[None, keys], v[None, keys], o[None, rows],
                                    lse[None, :, rows], None if dlse is None else dlse[None, :, rows], causal, scale,
                                    (left, right), softcap, sinks)
        dq[rows], dk[keys], dv[keys] = (x[0] for x in found[:3])
        if sinks is not None:
            dsinks += found[3]
    return dq, dk, dv, None if sinks is None else dsinks.to(sinks.dtype)


def capped(x: Tensor, softcap: float) -> tuple:
    """softcap * tanh(x / softcap) and its derivative; x and 1 where softcap is 0."""
    if softcap == 0.0:
        return x, 1.0
    t = torch.tanh(x / softcap)
    return softcap * t, 1 - t * t


def sinks_gradient(sinks: Tensor, lse: Tensor, of_rows: Tensor) -> Tensor:
    """Of the logits (H,) that each head has beside its keys', with the value 0. of_rows: dlse - rowsum(o * do), as lse
    (B, H, Sq)."""
    p = torch.exp(sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == -math.inf, 0.0)
    return (p * of_rows).sum((0, 2)).to(sinks.dtype)
