"""Multi-head latent attention over a paged cache in plain PyTorch: what it means."""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq.reference.decode import flash_attn_with_kvcache
from tkq.reference.fp8 import narrowed, scales_of
from tkq.runtime.call import autocast

VALUES, GROUP = 512, 128  # columns of a row that are values, too; those of a float8 row that share a scale


def packed(rows: Tensor) -> Tensor:
    """(.., 656) uint8 of rows (.., 576): 512 columns of e4m3, four float32 scales, 64 columns of bf16."""
    groups = rows[..., :VALUES].unflatten(-1, (-1, GROUP)).float()
    scales = scales_of(groups.flatten(0, -2), (1, None), torch.float8_e4m3fn).view(groups.shape[:-1])
    small = narrowed(groups / scales[..., None], torch.float8_e4m3fn).flatten(-2)
    parts = small, scales, rows[..., VALUES:].to(torch.bfloat16).contiguous()
    return torch.cat([x.view(torch.uint8) for x in parts], -1)


def unpacked(rows: Tensor) -> Tensor:
    """(.., 576) float32 of float8 rows (.., 656): what they mean. Kernels round it to bf16."""
    small, scales, rotated = rows.split((VALUES, 16, 128), -1)
    scales = scales.contiguous().view(torch.float32)
    values = small.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, GROUP)) * scales[..., None]
    return torch.cat((values.flatten(-2), rotated.contiguous().view(torch.bfloat16).float()), -1)


def mla_decode(q: Tensor, kv_cache: Tensor, block_table: Optional[Tensor], cache_seqlens: Optional[Tensor],
               softmax_scale: float, causal: bool = True, indices: Optional[Tensor] = None,
               topk_length: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    """o (B, Sq, H, 512) of q's dtype and lse (B, H, Sq) float32: attention with one K/V head, whose values are the
    first columns of its keys. See `tkq.mla_decode`."""
    if kv_cache.dtype == torch.uint8:
        kv_cache = unpacked(kv_cache).to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    if indices is not None:
        return sparse(q, kv_cache.reshape(-1, q.shape[3]), softmax_scale, indices, topk_length)
    k = kv_cache.unsqueeze(2) if kv_cache.dim() == 3 else kv_cache
    return flash_attn_with_kvcache(q, k, k[..., :VALUES], cache_seqlens, block_table, causal=causal,
                                   softmax_scale=softmax_scale)


@autocast.apart
def sparse(q: Tensor, rows: Tensor, softmax_scale: float, indices: Tensor, topk_length: Optional[Tensor]):
    """Query by query, over those of the cache's rows (N, 576) that it lists. NaN for a list that says something
    wrong."""
    B, Sq, H, _ = q.shape
    o, lse = q.new_full((B, Sq, H, VALUES), math.nan), q.new_full((B, H, Sq), math.nan, dtype=torch.float32)
    wide, topk = torch.float64 if q.dtype == torch.float64 else torch.float32, indices.shape[2]
    lengths = q.new_full((B, Sq), topk, dtype=torch.int32) if topk_length is None else topk_length
    lengths = (lengths if lengths.dim() == 2 else lengths[:, None]).expand(B, Sq).tolist()
    for b in range(B):
        for i in range(Sq):
            listed = indices[b, i, :max(lengths[b][i], 0)].long()
            if not 0 <= lengths[b][i] <= topk or ((listed < -1) | (listed >= len(rows))).any():
                continue
            k = rows[listed[listed >= 0]].to(wide)
            scores = q[b, i].to(wide) @ k.T * softmax_scale
            total = scores.logsumexp(-1) if len(k) else scores.new_full((H,), -math.inf)
            o[b, i], lse[b, :, i] = (scores.softmax(-1) @ k[:, :VALUES]).to(q.dtype), total.float()
    return o, lse
