"""Usual arguments of what works on caches of keys and values."""
import torch

from tkq.reference.mla import packed

from .usual import FP32, _attention_options


def flash_attn_with_kvcache(d):
    count, queries, heads_k, shared, dtype = d.one(1, 3), d.one(1, 1, 3), d.one(1, 2), d.one(1, 3), d.half()
    page, each, dim, heads = d.one(1, 4, 16), 3, d.of((64, 96), (64,)), heads_k * shared
    table = d.maybe(0.6, lambda: d.integers(0, 7, count, each, dtype=torch.int32))
    cache = (count, page * each) if table is None else (7, page)
    options = _attention_options(d, heads, dtype)
    options.pop("deterministic", None)
    k_cache, v_cache = (d.normal(*cache, heads_k, dim, dtype=dtype) for _ in range(2))
    k_descale = v_descale = None
    if d.chance(0.3):
        k_cache, v_cache = (x.to(torch.float8_e4m3fn) for x in (k_cache, v_cache))
        of = d.one((heads_k,), (count, heads_k), (*cache, heads_k))
        k_descale, v_descale = (d.normal(*of, dtype=FP32).abs() for _ in range(2))
    q, starts = (count, queries), None
    if d.chance(0.25):
        ends = [0]
        for _ in range(count):
            ends.append(ends[-1] + d.one(0, 1, 5))
        q, starts, options["causal"] = ends[-1:], d.int32(ends), True
    tree = None
    if starts is None and d.chance(0.25):
        tree, options["window_size"] = d.integers(0, 1 << queries, count, queries, dtype=torch.int64), (None, None)
    return dict(q=d.normal(*q, heads, dim, dtype=dtype), k_cache=k_cache, v_cache=v_cache,
                cache_seqlens=d.int32([d.one(0, 1, page * each, page + 1) for _ in range(count)]), block_table=table,
                k_descale=k_descale, v_descale=v_descale, **options, plan=None, cu_seqlens_q=starts,
                tree_mask=tree, batch_invariant=d.chance(0.3), out=None)


def cascade_attention(d):
    """The first pages of all sequences are the same; some do not have the whole prefix, or are not there."""
    count, queries, heads_k, shared, dtype = d.one(1, 3), d.one(1, 1, 3), d.one(1, 2), d.one(1, 3), d.half()
    page, each, dim, heads = d.one(1, 4, 16), 4, d.of((64, 96), (64,)), heads_k * shared
    prefix = d.one(0, 1, page, page + 1, 2 * page)
    # No page twice in a sequence, as of `mla_decode`; the prefix has pages 7 and 8.
    table = torch.stack([torch.randperm(7, generator=d.generator)[:each] for _ in range(count)]).int().to(d.device)
    table[:, :prefix // page] = torch.tensor([7, 8], device=d.device)[:prefix // page]
    options = _attention_options(d, heads, dtype)
    options.pop("deterministic", None)
    options["window_size"] = (None, None)
    k_cache, v_cache = (d.normal(9, page, heads_k, dim, dtype=dtype) for _ in range(2))
    k_descale = v_descale = None
    if d.chance(0.3):
        k_cache, v_cache = (x.to(torch.float8_e4m3fn) for x in (k_cache, v_cache))
        of = d.one((heads_k,), (9, page, heads_k))
        k_descale, v_descale = (d.normal(*of, dtype=FP32).abs() for _ in range(2))
    q, starts, most = (count, queries), None, queries
    if d.chance(0.25):
        ends = [0]
        for _ in range(count):
            ends.append(ends[-1] + d.one(0, 1, 5))
        q, starts, options["causal"], most = ends[-1:], d.int32(ends), True, 5
    least = prefix + most - 1
    lengths = d.int32([d.one(least, least + 1, page * each, max(prefix - 1, 1)) for _ in range(count)])
    return dict(q=d.normal(*q, heads, dim, dtype=dtype), k_cache=k_cache, v_cache=v_cache, block_table=table,
                cache_seqlens=lengths, prefix_len=prefix, plan=None, k_descale=k_descale, v_descale=v_descale,
                **options, cu_seqlens_q=starts, batch_invariant=d.chance(0.3), cascade=d.one(None, True, False),
                out=None)


def mla_decode(d):
    count, queries, heads, dtype = d.one(1, 3), d.one(1, 1, 3), d.one(1, 5, 16), d.half()
    page, each = d.one(1, 4, 16), 3
    cache = (7, page, 576) if d.chance(0.5) else (7, page, 1, 576)
    # No page twice in a sequence: float32 tells equal keys apart, whose scores a large scale multiplies.
    table = torch.stack([torch.randperm(7, generator=d.generator)[:each] for _ in range(count)]).int().to(d.device)
    lengths = d.int32([d.one(0, 1, page * each, page + 1) for _ in range(count)])
    indices = topk_length = None
    if d.chance(0.4):
        table = lengths = None
        indices, topk_length = _rows(d, count, queries, 7 * page)
    kv_cache = d.normal(*cache, dtype=dtype)
    if d.chance(0.3):
        kv_cache, dtype = packed(kv_cache), torch.bfloat16
    return dict(q=d.normal(count, queries, heads, 576, dtype=dtype), kv_cache=kv_cache,
                block_table=table, cache_seqlens=lengths, softmax_scale=d.one(0.05, 0.2), causal=d.chance(0.5),
                plan=None, indices=indices, topk_length=topk_length, batch_invariant=d.chance(0.3),
                return_lse=d.chance(0.5), out=None)


def _rows(d, count, queries, rows):
    """Lists of rows, none of them twice, with holes; and how long they are."""
    topk = d.one(0, 1, 5, 7)
    order = torch.stack([torch.randperm(rows, generator=d.generator)[:topk] for _ in range(count * queries)])
    holes = torch.rand(order.shape, generator=d.generator) < 0.2
    indices = order.masked_fill(holes, -1).view(count, queries, topk).int().to(d.device)
    shape = d.one(None, (count,), (count, queries))
    return indices, None if shape is None else d.integers(0, topk + 2, *shape, dtype=torch.int32)


def kv_append(d):
    tokens, heads, dtype, dim = d.one(0, 1, 5), d.one(1, 2), d.real(), d.one(32, 64)
    angles, of = d.one(8, 16), d.one(FP32, dtype)
    slots = torch.randperm(28, generator=d.generator)[:tokens].to(d.device)
    cache, k_scale, v_scale, width = dtype, None, None, 24
    if d.chance(0.3):
        cache, width = torch.float8_e4m3fn, 32
        scales = d.one((heads,), (7, 4, heads))
        k_scale, v_scale = (d.normal(*scales, dtype=FP32).abs() + 0.1 for _ in range(2))
    return dict(k=d.normal(tokens, heads, dim, dtype=dtype), v=d.normal(tokens, heads, width, dtype=dtype),
                k_cache=d.normal(7, 4, heads, dim).to(cache), v_cache=d.normal(7, 4, heads, width).to(cache),
                slot_mapping=slots.to(d.one(torch.int32, torch.int64)),
                cos=d.normal(9, angles, dtype=of), sin=d.normal(9, angles, dtype=of), interleaved=d.chance(0.5),
                positions=d.integers(0, 9, tokens), q=d.normal(tokens, 3, dim, dtype=dtype),
                k_scale=k_scale, v_scale=v_scale)


def merge_state(d):
    shape, dtype = d.one((2, 5, 3, 16), (5, 3, 64), (0, 2, 8)), d.real()
    of = (*shape[:-3], shape[-2], shape[-3])
    return dict(o_a=d.normal(*shape, dtype=dtype), lse_a=d.normal(*of, dtype=FP32), o_b=d.normal(*shape, dtype=dtype),
                lse_b=d.normal(*of, dtype=FP32))
