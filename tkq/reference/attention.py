"""Attention's forward pass in plain PyTorch: what it means. The path of CPU tensors, and the oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast."""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq.runtime.call import autocast


@autocast.apart
def flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: Optional[float] = None,
               left: int = -1, right: int = -1, softcap: float = 0.0,
               sinks: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    """softmax(scale * q @ k.T) @ v for q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv): o (B, Sq, H, Dv) of q's
    dtype, and lse (B, H, Sq) float32.

    Query i is aligned with key i + Sk - Sq: the last query with the last key. It sees ``left`` keys before that one
    and ``right`` behind, -1: all that there are; causal is right = 0. softcap: scores become softcap * tanh(score /
    softcap). sinks (H,): the logit of one more key, whose value is 0. A row that sees no key gives 0; its lse is -inf,
    or the sink."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[2] // k.shape[2] if k.shape[2] else 1
    wq, wk, wv = (x.to(wide).transpose(1, 2) for x in (q, k, v))
    wk, wv = wk.repeat_interleave(group, 1), wv.repeat_interleave(group, 1)
    scores = wq @ wk.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[1], k.shape[1], 0 if causal else right, left, q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1) if k.shape[1] else scores.new_full(scores.shape[:-1], -math.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide)[:, None])
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return (p @ wv).transpose(1, 2).to(q.dtype).contiguous(), lse.float()


def visible(rows: int, keys: int, right: int, left: int, device) -> Optional[Tensor]:
    """(rows, keys): does the query see the key? None: each sees all."""
    if left < 0 and right < 0:
        return None
    beyond = torch.arange(keys, device=device) - (torch.arange(rows, device=device)[:, None] + keys - rows)
    seen = torch.ones_like(beyond, dtype=torch.bool)
    if left >= 0:
        seen &= beyond >= -left
    if right >= 0:
        seen &= beyond <= right
    return seen


def sequences(cu_seqlens: Tensor, seqused: Optional[Tensor], total: int) -> list:
    """(first row, end) of each sequence, as far as it is in use. A number below 0 counts as 0, one beyond ``total``
    rows as that; one below a number of cu_seqlens before it as that one: the sequence is empty then."""
    cu = cu_seqlens.clamp(0, total).cummax(0).values.tolist() if len(cu_seqlens) else []
    used = [total] * len(cu) if seqused is None else seqused.tolist()
    return [(a, min(b, a + max(n, 0))) for a, b, n in zip(cu, cu[1:], used)]


@autocast.apart
def flash_attn_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                      seqused_q: Optional[Tensor] = None, seqused_k: Optional[Tensor] = None, causal: bool = False,
                      softmax_scale: Optional[float] = None, left: int = -1, right: int = -1, softcap: float = 0.0,
                      sinks: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    """``flash_attn`` of each sequence: rows cu_seqlens_q[s] .. cu_seqlens_q[s + 1] of q (total_q, H, D) with rows
    cu_seqlens_k[s] .. of k and v; of each only the first seqused_q[s], seqused_k[s]. o (total_q, H, Dv), lse (H,
    total_q). Rows of no sequence, and those not in use, are rows that see no key. Other numbers: see ``sequences``."""
    o = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32, device=q.device)
    if sinks is not None:
        lse.copy_(sinks.float()[:, None].expand_as(lse))
    for (a, b), (c, d) in zip(sequences(cu_seqlens_q, seqused_q, q.shape[0]),
                              sequences(cu_seqlens_k, seqused_k, k.shape[0])):
        if b > a:
            one, one_lse = flash_attn(q[None, a:b], k[None, c:d], v[None, c:d], causal, softmax_scale, left, right,
                                      softcap, sinks)
            o[a:b], lse[:, a:b] = one[0], one_lse[0]
    return o, lse
