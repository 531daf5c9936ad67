"""Attention over a cache in the list of every op: its tensors, and calls that give what they wrote to as well."""
import torch

import tkq
from tests.helpers.ops.step_calls import F32, _own


def lengths(t):
    return dict(cache_seqlens=t.integers(0, 17, t.rows))


def paged(t):
    """A query for each sequence, whose two pages of 8 keys are any."""
    return dict(q=t(t.rows, 1, 4, 64), k_cache=t(16, 8, 2, 64), v_cache=t(16, 8, 2, 64), **lengths(t),
                block_table=t.integers(0, 16, t.rows, 2))


def attend(q, k_cache, v_cache, cache_seqlens, block_table):
    return tkq.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=block_table,
                                       return_lse=True)


def rows(t):
    """Three queries for each sequence, which has a row of the cache."""
    return dict(q=t(t.rows, 3, 4, 64), k_cache=t(t.rows, 16, 2, 64), v_cache=t(t.rows, 16, 2, 64), **lengths(t))


def attend_planned(q, k_cache, v_cache, cache_seqlens):
    plan = tkq.plan_decode(cache_seqlens, 4, 2, 64, max_seqlen_q=3, window_size=(9, None))
    return tkq.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, plan=plan,
                                       window_size=(9, None))


def latent(t):
    """Two queries for each sequence over pages of latent rows."""
    return dict(q=t(t.rows, 2, 4, 576), kv_cache=t(16, 8, 576), block_table=t.integers(0, 16, t.rows, 2), **lengths(t))


def attend_latent(q, kv_cache, block_table, cache_seqlens):
    plan = tkq.plan_decode(cache_seqlens, 4, 1, 576, head_dim_v=512, max_seqlen_q=2)
    return tkq.mla_decode(q, kv_cache, block_table, cache_seqlens, softmax_scale=0.1, plan=plan, return_lse=True)


def new_tokens(t):
    slots = torch.arange(t.rows, device=t.device) * 5 % 48 - 1
    return dict(k=t(t.rows, 2, 64), v=t(t.rows, 2, 64), k_cache=t(6, 8, 2, 64), v_cache=t(6, 8, 2, 64),
                slot_mapping=slots)


def append(k, v, k_cache, v_cache, slot_mapping):
    k_cache, v_cache = _own(k_cache), _own(v_cache)
    tkq.kv_append(k, v, k_cache, v_cache, slot_mapping)
    return k_cache, v_cache


def rotated_tokens(t):
    return dict(**new_tokens(t), cos=t(20, 16, dtype=F32), sin=t(20, 16, dtype=F32),
                positions=t.integers(0, 20, t.rows), q=t(t.rows, 4, 64))


def append_rotated(k, v, k_cache, v_cache, *others):
    k_cache, v_cache = _own(k_cache), _own(v_cache)
    return append_alone(k, v, k_cache, v_cache, *others), k_cache, v_cache


def append_alone(k, v, k_cache, v_cache, slot_mapping, *others):
    """others: cos, sin, positions, q."""
    cos, sin, positions, q = others
    return tkq.kv_append(k, v, k_cache, v_cache, slot_mapping, cos=cos, sin=sin, positions=positions, q=q)


def states(t):
    return dict(o_a=t(2, t.rows, 4, 64), lse_a=t(2, 4, t.rows, dtype=F32), o_b=t(2, t.rows, 4, 64),
                lse_b=t(2, 4, t.rows, dtype=F32))
