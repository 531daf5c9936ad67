"""Attention over a cache in plain PyTorch: what it means. The path of CPU tensors, and the oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast."""
import itertools
import math
from itertools import pairwise
from typing import Optional

import torch
from torch import Tensor

from tkq.reference.attention import visible
from tkq.reference.fp8 import narrowed, scales_of
from tkq.runtime.call import autocast

NUMBER = 0x746B7131  # of a plan's first word
FP8 = torch.float8_e4m3fn


def keys_of(cache: Tensor, sequence: int, length: int, table: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    """((length, Hk, D), (length,) bool: is the key there?) of a sequence; zeros where not."""
    if table is None:
        return cache[sequence, :length], torch.ones(length, dtype=torch.bool, device=cache.device)
    where = torch.arange(length, device=cache.device)
    pages = table[sequence].long()[where // cache.shape[1]]
    there = pages >= 0
    if not len(cache):  # no page to look at in place of one that is not there
        return cache.new_zeros(length, *cache.shape[2:]), there
    found = cache[pages.clamp(min=0), where % cache.shape[1]]
    return found * there[:, None, None] if there.all() else found.masked_fill(~there[:, None, None], 0), there


def scaled(cache: Tensor, descale: Optional[Tensor], sequence: int, length: int, table: Optional[Tensor],
           wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """`keys_of`, wide, times their scales."""
    found, there = keys_of(wider(cache), sequence, length, table)
    found = found.to(wide)
    if descale is None:
        return found, there
    if descale.dim() == 3:
        factor, _ = keys_of(descale[..., None], sequence, length, table)
    else:
        factor = (descale if descale.dim() == 1 else descale[sequence])[:, None]
    return found * factor.to(wide), there


def wider(cache: Tensor) -> Tensor:
    """float8 as float16, which has all its numbers."""
    return cache.half() if cache.dtype == FP8 else cache


def fine(cache: Tensor, sequence: int, length: int, table: Optional[Tensor]) -> bool:
    """Is all that a sequence says of itself in the cache?"""
    capacity = cache.shape[1] * (1 if table is None else table.shape[1])
    if not 0 <= length <= capacity:
        return False
    if table is None or not length:
        return True
    pages = table[sequence, :-(-length // cache.shape[1])]
    return bool(((pages >= -1) & (pages < cache.shape[0])).all())


@autocast.apart
def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor,
                            block_table: Optional[Tensor] = None, sinks: Optional[Tensor] = None, causal: bool = True,
                            softmax_scale: Optional[float] = None, left: int = -1, right: int = -1,
                            softcap: float = 0.0, k_descale: Optional[Tensor] = None,
                            v_descale: Optional[Tensor] = None, cu_seqlens_q: Optional[Tensor] = None,
                            tree_mask: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
    """o (B, Sq, H, Dv) of q's dtype and lse (B, H, Sq) float32, sequence by sequence; see
    `tkq.flash_attn_with_kvcache`. left, right: -1 without a limit. NaN for a sequence that says something wrong, and of
    ragged queries for rows of no sequence."""
    if cu_seqlens_q is not None:
        return _ragged(q, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_q, sinks=sinks, causal=causal,
                       softmax_scale=softmax_scale, left=left, right=right, softcap=softcap, k_descale=k_descale,
                       v_descale=v_descale)
    B, Sq, H, D = q.shape
    o, lse = q.new_full((B, Sq, H, v_cache.shape[3]), math.nan), q.new_full((B, H, Sq), math.nan, dtype=torch.float32)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = 1 / math.sqrt(D) if softmax_scale is None else softmax_scale
    for b, length in enumerate(cache_seqlens.tolist()):
        if not fine(k_cache, b, length, block_table):
            continue
        k, there = scaled(k_cache, k_descale, b, length, block_table, wide)
        v, _ = scaled(v_cache, v_descale, b, length, block_table, wide)
        k, v = (x.transpose(0, 1).repeat_interleave(H // k_cache.shape[2], 0) for x in (k, v))
        scores = q[b].to(wide).transpose(0, 1) @ k.mT * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if tree_mask is not None:
            seen = of_tree(tree_mask[b], length)
        else:
            seen = visible(Sq, length, 0 if causal else right, left, q.device)
        scores = scores.masked_fill(~(there if seen is None else seen & there), -math.inf)
        total = scores.logsumexp(-1) if length else scores.new_full(scores.shape[:-1], -math.inf)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.to(wide)[:, None].expand_as(total))
        # divided by their sum: of large scores the log-sum-exp is rounded by more than a logarithm of their number
        top = scores.amax(-1, keepdim=True) if length else scores.new_full((*scores.shape[:-1], 1), -math.inf)
        top = top if sinks is None else torch.maximum(top, sinks.to(wide)[:, None, None])
        top = top.masked_fill(top == -math.inf, 0.0)
        p = torch.exp(scores - top)
        norm = p.sum(-1, keepdim=True)
        if sinks is not None:  # an infinite one leaves nothing to the keys
            one = sinks.to(wide)[:, None, None]
            norm = norm + torch.exp(one - top).masked_fill(one == math.inf, math.inf)
        p = p / norm.masked_fill(norm == 0, 1.0)
        o[b], lse[b] = (p @ v).transpose(0, 1).to(q.dtype), total.float()
    return o, lse


def of_tree(masks: Tensor, keys: int) -> Tensor:
    """(Sq, keys) bool of the queries' masks: keys before the last Sq ones, and of those whose bit is set."""
    draft = torch.arange(keys, device=masks.device) - (keys - len(masks))
    return (draft < 0) | (masks[:, None] >> draft.clamp(min=0) & 1).bool()


def _ragged(q, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_q, k_descale=None, v_descale=None, **options):
    """Sequence by sequence; o (T, H, Dv), lse (H, T)."""
    T, H, _ = q.shape
    o, lse = q.new_full((T, H, v_cache.shape[3]), math.nan), q.new_full((H, T), math.nan, dtype=torch.float32)
    starts = cu_seqlens_q.tolist()
    for b in range(len(cache_seqlens)):
        first, end = starts[b:b + 2]
        if not 0 <= first < end <= T:
            continue
        rows = slice(b, b + 1)
        k, v = (k_cache, v_cache) if block_table is not None else (k_cache[rows], v_cache[rows])
        scales = [x if x is None or x.dim() == 1 or (x.dim() == 3 and block_table is not None) else x[rows]
                  for x in (k_descale, v_descale)]
        found, of = flash_attn_with_kvcache(q[None, first:end], k, v, cache_seqlens[rows],
                                            None if block_table is None else block_table[rows], **options,
                                            k_descale=scales[0], v_descale=scales[1])
        o[first:end], lse[:, first:end] = found[0], of[0]
    return o, lse


def rows_of_sequences(cu_seqlens_q: Tensor, total: int) -> Tensor:
    """(total,) bool: is the row a query of a sequence?"""
    found = torch.zeros(total, dtype=torch.bool, device=cu_seqlens_q.device)
    for first, end in pairwise(cu_seqlens_q.tolist()):
        if 0 <= first <= end <= total:
            found[first:end] = True
    return found


@autocast.apart
def merge_state(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) over the keys of both; see `tkq.merge_state`."""
    wide = torch.float64 if o_a.dtype == torch.float64 else torch.float32
    both = torch.stack((lse_a, lse_b)).to(wide)
    lse = both.logsumexp(0)
    # where a sum is infinite, as a sink's may be, all weight is there
    weights = torch.exp(both - lse.masked_fill(lse == -math.inf, 0.0)).masked_fill(both == math.inf, 1.0)
    weights = (weights / (both == math.inf).sum(0).clamp(min=1)).mT.unsqueeze(-1)
    parts = torch.stack((o_a, o_b)).to(wide).masked_fill(weights == 0, 0.0)
    return (weights * parts).sum(0).to(o_a.dtype), lse.float()


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (T, H, D), its first 2 * cos.shape[1] columns rotated, wide; NaN where the table has no such position."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    there = (positions >= 0) & (positions < len(cos))
    at = positions.long().clamp(0, max(len(cos) - 1, 0))
    c, s = (t[at].to(wide).masked_fill(~there[:, None], math.nan)[:, None] for t in (cos, sin))
    result, part = x.to(wide).clone(), x[..., :2 * cos.shape[1]].to(wide)
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    found = a * c - b * s, a * s + b * c
    found = torch.stack(found, -1).flatten(-2) if interleaved else torch.cat(found, -1)
    result[..., :found.shape[-1]] = found
    return result


@autocast.apart
def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
              cos: Optional[Tensor] = None, sin: Optional[Tensor] = None, interleaved: bool = False,
              positions: Optional[Tensor] = None, q: Optional[Tensor] = None, k_scale: Optional[Tensor] = None,
              v_scale: Optional[Tensor] = None) -> Optional[Tensor]:
    """The caches are written to, and scales of tokens; q, rotated. See `tkq.kv_append`."""
    if cos is not None:
        k, q = (None if x is None else turned(x, cos, sin, positions, interleaved) for x in (k, q))
        q = None if q is None else q.to(v.dtype)
    page = k_cache.shape[1]
    slots = slot_mapping.long()
    there = (slots >= 0) & (slots < len(k_cache) * page)
    where = slots[there] // page, slots[there] % page
    for cache, new, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        new = new[there]
        if cache.dtype == FP8:
            new, scale_of = quantised(new, scale)
            if scale is not None and scale.dim() == 3:
                scale[where] = scale_of.to(scale.dtype)
            cache.view(torch.uint8)[where] = new.view(torch.uint8)
        else:
            cache[where] = new.to(cache.dtype)
    return q


def quantised(x: Tensor, scale: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    """(x (T, Hk, D) in float8, scales (T, Hk)): found where there is one for each token."""
    x = x if x.dtype == torch.float64 else x.float()
    if scale is None:
        scale = x.new_ones(x.shape[1])
    elif scale.dim() == 3:
        scale = scales_of(x.flatten(0, 1), (1, None), FP8).view(x.shape[:2])
    scale = scale.expand(x.shape[:2])
    return narrowed((x / scale[..., None]).float(), FP8), scale


def plan_decode(cache_seqlens: Tensor, cu_seqlens_q: Optional[Tensor], of, parts: int) -> Tensor:
    """The plan's words, of a `tkq.attention.decode.planned.Planned`: see `tkq.attention.decode.words`."""
    if cu_seqlens_q is None:
        balanced = of.divided if of.balanced(len(cache_seqlens), parts) else None
        return planned(cache_seqlens, of.sizes(len(cache_seqlens), parts), balanced)
    tiles, lengths, bad = [], [], 0
    starts = cu_seqlens_q.tolist()
    for b, length in enumerate(cache_seqlens.tolist()):
        first, end = starts[b:b + 2]
        if not 0 <= first <= end <= of.total:
            bad = 1
            continue
        for row in range(first, end, of.queries):
            queries = min(end - row, of.queries)
            tiles.append((b, row, queries))
            lengths.append(-1 if length < 0 else max(length - (end - row - queries), 0))
    most = of.batch(len(cache_seqlens))
    tiles, lengths = (tiles + [(0, 0, 0)] * most)[:most], (lengths + [0] * most)[:most]
    if bad:
        lengths[-1] = -1
    made = planned(cache_seqlens.new_tensor(lengths), of.sizes(most, parts))
    return torch.cat((made, cache_seqlens.new_tensor(tiles).flatten()))


def planned(cache_seqlens: Tensor, sizes: tuple, balanced=None) -> Tensor:
    """The words of `tkq.attention.decode.planner`'s sizes. balanced: where each sequence begins, blocks of a part and
    of all together, from blocks of each and the number of parts; None: parts are as equal as can be."""
    heads_kv, group, queries, tiles, key_block, left, split, parts, overhead, least, most = sizes
    lengths, counts = [], []
    for length in cache_seqlens.tolist():
        if length < 0 or (length - 1) // key_block + 1 > most:
            length = -1
        lengths.append(length)
        first = 0 if left < 0 else max(length - queries - left, 0) // key_block
        counts.append(max(-(-max(length, 0) // key_block) - first, 1))
    if balanced is not None:
        (prefix, part, total), overhead = balanced(counts, parts), 0
    else:
        work = [(-(-blocks // split) if split else blocks + overhead) * heads_kv * tiles for blocks in counts]
        prefix, total = [0, *itertools.accumulate(work)][:-1], sum(work)
        part = max(-(-total // parts), max(least, 1))
    header = [NUMBER, len(lengths), heads_kv, group, queries, key_block, split, left, parts, part, total, overhead,
              int(-1 in lengths), 0, 0, 0]
    counters = [0] * (len(lengths) * heads_kv * tiles)
    starts = [0] * 2048
    for p in range(-(-total // part)):
        b = max(b for b, at in enumerate(prefix) if at <= p * part)
        weight = ([*prefix, total][b + 1] - prefix[b]) // (heads_kv * tiles)
        starts[4 * p:4 * p + 4] = b, lengths[b], prefix[b], weight
    return torch.tensor([*header, *starts, *lengths, *prefix, total, *counters], dtype=torch.int32,
                        device=cache_seqlens.device)
