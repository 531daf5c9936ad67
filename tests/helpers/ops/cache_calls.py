"""Attention over a cache in the list of every op: its tensors, and calls that give what they wrote to as well."""
import torch

import tkq
from tests.helpers.ops.step_calls import F32, _own

F8 = torch.float8_e4m3fn


def lengths(t):
    return dict(cache_seqlens=t.integers(0, 17, t.rows))


def paged(t):
    """A query for each sequence, whose two pages of 8 keys are any."""
    return dict(q=t(t.rows, 1, 4, 64), k_cache=t(16, 8, 2, 64), v_cache=t(16, 8, 2, 64), **lengths(t),
                block_table=t.integers(0, 16, t.rows, 2))


def attend(q, k_cache, v_cache, cache_seqlens, block_table):
    return tkq.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table,
                                       return_lse=True)


def float8_pages(t):
    """As `paged`, of e4m3, with scales for each slot and head."""
    return dict(q=t(t.rows, 1, 4, 64), k_cache=t(16, 8, 2, 64, dtype=F8), v_cache=t(16, 8, 2, 64, dtype=F8),
                **lengths(t), block_table=t.integers(0, 16, t.rows, 2), k_descale=t(16, 8, 2, dtype=F32).abs(),
                v_descale=t(16, 8, 2, dtype=F32).abs())


def attend_float8(q, k_cache, v_cache, cache_seqlens, block_table, k_descale, v_descale):
    return tkq.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table,
                                       k_descale=k_descale, v_descale=v_descale)


def ragged(t):
    """As `paged`: two sequences, with queries of their own number."""
    return dict(q=t(t.rows, 4, 64), k_cache=t(16, 8, 2, 64), v_cache=t(16, 8, 2, 64),
                cache_seqlens=t.integers(9, 17, 2), block_table=t.integers(0, 16, 2, 2),
                cu_seqlens_q=torch.tensor([0, 5, t.rows], dtype=torch.int32, device=t.device))


def attend_ragged(q, k_cache, v_cache, cache_seqlens, block_table, cu_seqlens_q):
    return tkq.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table,
                                       cu_seqlens_q=cu_seqlens_q, return_lse=True)


def drafted(t):
    """Three queries for each sequence, which see themselves and any others of its last three keys."""
    return dict(q=t(t.rows, 3, 4, 64), k_cache=t(16, 8, 2, 64), v_cache=t(16, 8, 2, 64), **lengths(t),
                block_table=t.integers(0, 16, t.rows, 2),
                tree_mask=t.integers(0, 8, t.rows, 3, dtype=torch.int64) | torch.tensor([1, 2, 4], device=t.device))


def attend_drafted(q, k_cache, v_cache, cache_seqlens, block_table, tree_mask):
    return tkq.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table,
                                       tree_mask=tree_mask, return_lse=True)


def rows(t):
    """Three queries for each sequence, which has a row of the cache."""
    return dict(q=t(t.rows, 3, 4, 64), k_cache=t(t.rows, 16, 2, 64), v_cache=t(t.rows, 16, 2, 64), **lengths(t))


def attend_planned(q, k_cache, v_cache, cache_seqlens):
    plan = tkq.plan_decode(cache_seqlens, 4, 2, 64, max_seqlen_q=3, window_size=(9, None))
    return tkq.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, plan=plan,
                                       window_size=(9, None))


def shared_pages(t):
    """As `paged`, of three pages, the first of which is the same for all."""
    table = t.integers(0, 16, t.rows, 3)
    table[:, 0] = 5
    return dict(q=t(t.rows, 2, 4, 64), k_cache=t(16, 8, 2, 64), v_cache=t(16, 8, 2, 64), block_table=table,
                cache_seqlens=t.integers(11, 25, t.rows))


def attend_shared(q, k_cache, v_cache, block_table, cache_seqlens):
    return tkq.cascade_attention(q, k_cache, v_cache, block_table=block_table, cache_seqlens=cache_seqlens,
                                 prefix_len=9, cascade=True, return_lse=True)


def attend_apart(q, k_cache, v_cache, block_table, cache_seqlens):
    plan = tkq.plan_cascade(cache_seqlens, 4, 2, 64, prefix_len=9, page_size=8, max_seqlen_q=2, cascade=False)
    return tkq.cascade_attention(q, k_cache, v_cache, block_table=block_table, plan=plan)


def latent(t):
    """Two queries for each sequence over pages of latent rows."""
    return dict(q=t(t.rows, 2, 4, 576), kv_cache=t(16, 8, 576), block_table=t.integers(0, 16, t.rows, 2), **lengths(t))


def attend_latent(q, kv_cache, block_table, cache_seqlens):
    plan = tkq.plan_decode(cache_seqlens, 4, 1, 576, head_dim_v=512, max_seqlen_q=2)
    return tkq.mla_decode(q, kv_cache, block_table, cache_seqlens, softmax_scale=0.1, plan=plan, return_lse=True)


def listed(t):
    """Two queries for each sequence, each with a list of latent rows."""
    return dict(q=t(t.rows, 2, 4, 576), kv_cache=t(16, 8, 1, 576), indices=t.integers(-1, 128, t.rows, 2, 20),
                topk_length=t.integers(0, 21, t.rows, 2))


def attend_listed(q, kv_cache, indices, topk_length):
    plan = tkq.plan_decode(topk_length.flatten(), 4, 1, 576, head_dim_v=512)
    return tkq.mla_decode(q, kv_cache, softmax_scale=0.1, plan=plan, indices=indices, topk_length=topk_length,
                          return_lse=True)


def new_tokens(t):
    slots = torch.arange(t.rows, device=t.device) * 5 % 48 - 1
    return dict(k=t(t.rows, 2, 64), v=t(t.rows, 2, 64), k_cache=t(6, 8, 2, 64), v_cache=t(6, 8, 2, 64),
                slot_mapping=slots)


def append(k, v, k_cache, v_cache, slot_mapping):
    k_cache, v_cache = _own(k_cache), _own(v_cache)
    tkq.kv_append(k, v, k_cache, v_cache, slot_mapping)
    return k_cache, v_cache


def quantised_tokens(t):
    """Into a cache of e4m3 without scales: those of tokens are results."""
    given = new_tokens(t)
    return dict(given, k_cache=t(6, 8, 2, 64, dtype=F8), v_cache=t(6, 8, 2, 64, dtype=F8),
                k_scale=t(6, 8, 2, dtype=F32), v_scale=t(6, 8, 2, dtype=F32))


def quantise(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    written = [_own(x) for x in (k_cache, v_cache, k_scale, v_scale)]
    tkq.kv_append(k, v, *written[:2], slot_mapping, k_scale=written[2], v_scale=written[3])
    return tuple(x.float() if isinstance(x, torch.Tensor) else x for x in written)


def rotated_tokens(t):
    return dict(**new_tokens(t), cos=t(20, 16, dtype=F32), sin=t(20, 16, dtype=F32),
                positions=t.integers(0, 20, t.rows), q=t(t.rows, 4, 64))


def append_rotated(k, v, k_cache, v_cache, slot_mapping, **others):
    k_cache, v_cache = _own(k_cache), _own(v_cache)
    return tkq.kv_append(k, v, k_cache, v_cache, slot_mapping, **others), k_cache, v_cache


def states(t):
    return dict(o_a=t(2, t.rows, 4, 64), lse_a=t(2, 4, t.rows, dtype=F32), o_b=t(2, t.rows, 4, 64),
                lse_b=t(2, 4, t.rows, dtype=F32))


def cases(Case):
    """What the list of every op has of caches."""
    cast = "q", "k_cache", "v_cache"
    return (
        Case("flash_attn_with_kvcache", paged, attend, cast=cast),
        Case("flash_attn_with_kvcache, planned ahead", rows, attend_planned, cast=cast),
        Case("flash_attn_with_kvcache, float8", float8_pages, attend_float8, cast=("q",)),
        Case("flash_attn_with_kvcache, ragged", ragged, attend_ragged, cast=cast),
        Case("flash_attn_with_kvcache, with a tree mask", drafted, attend_drafted, cast=cast),
        Case("cascade_attention", shared_pages, attend_shared, cast=cast),
        Case("cascade_attention, planned apart", shared_pages, attend_apart, cast=cast),
        Case("mla_decode", latent, attend_latent, cast=("q", "kv_cache")),
        Case("mla_decode, sparse", listed, attend_listed, cast=("q", "kv_cache")),
        Case("plan_decode", lengths, lambda cache_seqlens: tkq.plan_decode(cache_seqlens, 8, 2, 64)),
        Case("kv_append", new_tokens, append, alone=lambda k, v, k_cache, v_cache, slot_mapping:
             tkq.kv_append(k, v, k_cache, v_cache, slot_mapping)),
        Case("kv_append, rotated", rotated_tokens,
             lambda k, v, k_cache, v_cache, slot_mapping, cos, sin, positions, q: append_rotated(
                 k, v, k_cache, v_cache, slot_mapping, cos=cos, sin=sin, positions=positions, q=q),
             alone=lambda k, v, k_cache, v_cache, slot_mapping, cos, sin, positions, q: tkq.kv_append(
                 k, v, k_cache, v_cache, slot_mapping, cos=cos, sin=sin, positions=positions, q=q)),
        Case("kv_append, float8", quantised_tokens, quantise,
             alone=lambda k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale: tkq.kv_append(
                 k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)),
        Case("merge_state", states, lambda o_a, lse_a, o_b, lse_b: tkq.merge_state(o_a, lse_a, o_b, lse_b)))
