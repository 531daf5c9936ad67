"""What works on caches of keys and values means, in float64 on the CPU."""
import itertools
import math

import torch

from tkq.reference.mla import unpacked

from .oracles import WIDE, Wanted, operand, wide
from .oracles_attention import attend, results


def flash_attn_with_kvcache(given):
    """Each sequence by itself; one that is not in the cache has NaN."""
    q, k, v = (operand(given, n) for n in ("q", "k_cache", "v_cache"))
    scales = [None if given[n] is None else wide(given[n]) for n in ("k_descale", "v_descale")]
    k, v = (x if s is None or s.dim() == 2 else x * s[..., None] for x, s in zip((k, v), scales))
    sinks = None if given["sinks"] is None else operand(given, "sinks")
    table, lengths = given["block_table"], wide(given["cache_seqlens"]).long().tolist()
    o = torch.full((*q.shape[:-1], v.shape[3]), math.nan, dtype=WIDE)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), math.nan, dtype=WIDE)
    starts = None if given["cu_seqlens_q"] is None else wide(given["cu_seqlens_q"]).long().tolist()
    for b, length in enumerate(lengths):
        pages = [b] if table is None else wide(table[b]).long().tolist()[:-(-length // k.shape[1])]
        if 0 <= length <= k.shape[1] * (1 if table is None else table.shape[1]) and all(
                0 <= page < len(k) for page in pages):
            keys, values = (torch.cat([c[p] for p in pages] or [c[:0].flatten(0, 1)])[:length] for c in (k, v))
            if scales[0] is not None and scales[0].dim() == 2:
                keys, values = (x * s[b][:, None] for x, s in zip((keys, values), scales))
            if given.get("tree_mask") is not None:
                seen = _of_tree(given["tree_mask"].detach().cpu().clone()[b].tolist(), length)
                o[b], lse[b] = attend(q[b], keys, values, given, sinks, seen)
            elif starts is None:
                o[b], lse[b] = attend(q[b], keys, values, given, sinks)
            else:
                own = slice(*starts[b:b + 2])
                o[own], lse[:, own] = attend(q[own], keys, values, given, sinks)
    return results(given, o, lse)


def _of_tree(masks, keys):
    """(queries, keys): the last keys are as many drafts as there are queries, each bit of a mask is for one."""
    first = keys - len(masks)
    return torch.tensor([[key < first or mask >> (key - first) & 1 for key in range(keys)] for mask in masks]).bool(
        ).view(len(masks), keys)


def cascade_attention(given):
    """The same of sequences whose first query sees the whole prefix, if there is one; others are NaN."""
    lengths, starts, prefix = given["cache_seqlens"], given["cu_seqlens_q"], given["prefix_len"]
    queries = given["q"].shape[1] if starts is None else starts.diff()
    least = prefix + (queries - 1) * given["causal"]
    lengths = torch.where(lengths < least, -1, lengths) if prefix else lengths
    return flash_attn_with_kvcache(dict(given, cache_seqlens=lengths, window_size=(None, None)))


def mla_decode(given):
    """One K/V head, whose values are the first columns of its keys; of a list, a sequence of one query. Float8 rows are
    what they mean."""
    if given["kv_cache"].dtype == torch.uint8:
        given = dict(given, kv_cache=unpacked(given["kv_cache"].detach().cpu()))
    if given["indices"] is not None:
        return _of_lists(given)
    k = given["kv_cache"] if given["kv_cache"].dim() == 4 else given["kv_cache"].unsqueeze(2)
    return flash_attn_with_kvcache(dict(given, k_cache=k, v_cache=k[..., :512], sinks=None, softcap=0.0,
                                        window_size=(None, None), k_descale=None, v_descale=None, cu_seqlens_q=None))


def _of_lists(given):
    q, rows = operand(given, "q"), operand(given, "kv_cache").flatten(0, -2)
    indices = wide(given["indices"]).long()
    topk = indices.shape[2]
    lengths = torch.full(indices.shape[:2], topk) if given["topk_length"] is None else wide(given["topk_length"]).long()
    lengths = (lengths if lengths.dim() == 2 else lengths[:, None]).expand(indices.shape[:2]).tolist()
    o = torch.full((*q.shape[:3], 512), math.nan, dtype=WIDE)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, dtype=WIDE)
    options = dict(softmax_scale=given["softmax_scale"], softcap=0.0, causal=False, window_size=(None, None))
    for b, i in itertools.product(*map(range, indices.shape[:2])):
        listed = indices[b, i, :max(lengths[b][i], 0)]
        if 0 <= lengths[b][i] <= topk and ((listed >= -1) & (listed < len(rows))).all():
            k = rows[listed[listed >= 0]][:, None]
            o[b, i:i + 1], lse[b, :, i:i + 1] = attend(q[b, i:i + 1], k, k[..., :512], options, None)
    return results(given, o, lse)


def kv_append(given):
    """q, rotated; caches have tests of their own."""
    q, cos, sin = (operand(given, n) for n in ("q", "cos", "sin"))
    if q is None:
        return []
    at = wide(given["positions"]).long()
    cos, sin, n = cos[at][:, None], sin[at][:, None], 2 * cos.shape[1]
    found = q.clone()
    first, second = (slice(0, n, 2), slice(1, n, 2)) if given["interleaved"] else (slice(0, n // 2), slice(n // 2, n))
    found[..., first] = q[..., first] * cos - q[..., second] * sin
    found[..., second] = q[..., first] * sin + q[..., second] * cos
    return [Wanted("q", found, 4, given["q"].dtype)]


def merge_state(given):
    o_a, o_b, lse_a, lse_b = (operand(given, n) for n in ("o_a", "o_b", "lse_a", "lse_b"))
    lse = torch.logaddexp(lse_a, lse_b)
    both = 1.0 + ((lse_a == math.inf) & (lse_b == math.inf))
    of_a, of_b = (((x - lse).exp().masked_fill(x == math.inf, 1.0) / both).mT[..., None] for x in (lse_a, lse_b))
    return [Wanted("o", of_a * o_a + of_b * o_b, 4, given["o_a"].dtype), Wanted("lse", lse, 16, torch.float32)]
