"""flash-attention's functions on tkq: names and order of arguments of flash-attn 2, with what flash-attn 3 adds.

    from tkq.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Tensors are (B, S, H, D), or (total, H, D) of packed sequences, bf16 or fp16; `tkq.flash_attn`,
`tkq.flash_attn_varlen` and `tkq.flash_attn_with_kvcache` say which sizes and strides. Gradients are those functions'.

All functions:
    dropout_p: 0.0. It stands where flash-attn 2 has it: softmax_scale is to be given by name, as the two versions have
        it in different places.
    alibi_slopes: None; `tkq.flex_attention` takes ALiBi and any other score function.
    window_size: (left, right), -1 for no limit. causal: the last query sees the last key.
    num_splits, pack_gqa, sm_margin: of no effect on results there, and of none here.
    return_attn_probs: also return the log-sum-exp and None, in the place of flash-attn 2's S_dmask, which is for tests
        of dropout.

What is not there raises NotImplementedError that names the argument.
"""
from __future__ import annotations

import numbers
import re

import torch
from torch import Tensor

from . import flash_attn, flash_attn_varlen, kv_append
from . import flash_attn_with_kvcache as _with_kvcache
from .attention.decode import check as decode
from .runtime.call import check, ops

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]

OPEN = (-1, -1)
KVCACHE = "flash_attn_with_kvcache"


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
                    causal: bool = False, window_size=OPEN, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
                    deterministic: bool = False, return_attn_probs: bool = False, *, num_splits: int = 1,
                    pack_gqa: bool | None = None, sm_margin: int = 0):
    """`tkq.flash_attn`. Returns o (B, Sq, H, Dv), or (o, lse (B, H, Sq), None)."""
    _refuse("flash_attn_func", dropout_p, alibi_slopes)
    check.flag("flash_attn_func: return_attn_probs", return_attn_probs)
    return _results(flash_attn(q, k, v, causal=causal, softmax_scale=softmax_scale, window_size=window_size,
                               softcap=softcap, deterministic=deterministic, return_lse=return_attn_probs))


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **kwargs):
    """`flash_attn_func` of kv (B, Sk, 2, Hk, D); further arguments as there."""
    return flash_attn_func(q, *_parts("flash_attn_kvpacked_func: kv", kv, 5, 2), *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args, **kwargs):
    """`flash_attn_func` of qkv (B, S, 3, H, D); further arguments as there."""
    return flash_attn_func(*_parts("flash_attn_qkvpacked_func: qkv", qkv, 5, 3), *args, **kwargs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: float | None = None, causal: bool = False, window_size=OPEN,
                           softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Tensor | None = None, *,
                           seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, num_splits: int = 1,
                           pack_gqa: bool | None = None, sm_margin: int = 0):
    """`tkq.flash_attn_varlen`. Returns o (total_q, H, Dv), or (o, lse (H, total_q), None)."""
    _refuse("flash_attn_varlen_func", dropout_p, alibi_slopes, block_table=block_table)
    check.flag("flash_attn_varlen_func: return_attn_probs", return_attn_probs)
    return _results(flash_attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
                                      softmax_scale=softmax_scale, window_size=window_size, softcap=softcap,
                                      seqused_q=seqused_q, seqused_k=seqused_k, return_lse=return_attn_probs,
                                      deterministic=deterministic))


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                    max_seqlen_q: int, max_seqlen_k: int, *args, **kwargs):
    """`flash_attn_varlen_func` of kv (total_k, 2, Hk, D); further arguments as there."""
    return flash_attn_varlen_func(q, *_parts("flash_attn_varlen_kvpacked_func: kv", kv, 4, 2), cu_seqlens_q,
                                  cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args, **kwargs):
    """`flash_attn_varlen_func` of qkv (total, 3, H, D), each sequence over itself; further arguments as there."""
    return flash_attn_varlen_func(*_parts("flash_attn_varlen_qkvpacked_func: qkv", qkv, 4, 3), cu_seqlens, cu_seqlens,
                                  max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                            v: Tensor | None = None, rotary_cos: Tensor | None = None,
                            rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
                            cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
                            block_table: Tensor | None = None, softmax_scale: float | None = None,
                            causal: bool = False, window_size=OPEN, softcap: float = 0.0,
                            rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
                            return_softmax_lse: bool = False, *, pack_gqa: bool | None = None, sm_margin: int = 0):
    """`tkq.flash_attn_with_kvcache`, behind `tkq.kv_append` where there are new keys.

    k, v: (B, Snew, Hk, D): written into the caches behind cache_seqlens, in place, and seen by the queries.
    rotary_cos, rotary_sin: (P, R / 2), with k and v: new keys are rotated by their positions; queries by theirs, from
    cache_seqlens on, where causal or a window is given, else all by cache_seqlens. cache_seqlens: (B,) int32 or an int,
    keys that are in the caches before; None: all of them. cache_batch_idx: (B,), the rows of the caches, without a
    block_table. Where new keys come, the slots they go to are computed by torch, in a few launches:
    `tkq.plan_decode` and `tkq.kv_append` do once a step for all layers what this does in each.

    Returns o (B, Sq, H, Dv), or (o, lse (B, H, Sq))."""
    _refuse(KVCACHE, 0.0, alibi_slopes, cache_leftpad=cache_leftpad)
    check.flag(f"{KVCACHE}: rotary_interleaved", rotary_interleaved)
    check.flag(f"{KVCACHE}: return_softmax_lse", return_softmax_lse)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check.tensor(f"{KVCACHE}: {name}", tensor)
        check.rank(f"{KVCACHE}: {name}", tensor, 4)
        check.dtype(f"{KVCACHE}: {name}", tensor, ("bf16", "fp16"))
    if (k is None) != (v is None):
        raise ValueError(f"{KVCACHE}: {'k' if v is None else 'v'} is given alone, expected k and v, or neither")
    rows = _rows_of(q, k_cache, cache_batch_idx, block_table)
    keys = k_cache.shape[1] * (1 if rows is None else rows.shape[1])
    lengths = _lengths(cache_seqlens, q, keys if k is None else None)
    asked = dict(softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                 return_lse=return_softmax_lse)
    if k is not None:
        turned = q if rotary_cos is None else q.new_empty(q.shape)  # as kv_append gives it
        window = _before_writing((turned, k_cache, v_cache, lengths, rows), asked)
        check.refuse_gradient(KVCACHE, q=q, k=k, v=v)
        table = torch.arange(q.shape[0], device=q.device)[:, None] if rows is None else rows
        q = _append(q, k, v, (k_cache, v_cache, table), lengths, (rotary_cos, rotary_sin, rotary_interleaved),
                    causal or window != OPEN)
        lengths = torch.where(lengths < 0, lengths, lengths + k.shape[1])
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError(f"{KVCACHE}: rotary_cos and rotary_sin are given, allowed are they with k and v")
    return _with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, block_table=rows, **asked)


def _before_writing(tensors, asked):
    """Raises what the attention behind new keys would, while the caches are as they were. The window, -1 for no
    limit."""
    decode.flags(asked["causal"], False, False)
    window = decode.limits(asked["window_size"])
    decode.numbers(asked["softmax_scale"], asked["softcap"])
    call = decode.Call(*tensors)
    check.refuse_gradient(KVCACHE, q=call.q, k_cache=call.k_cache, v_cache=call.v_cache)
    decode.check_call(call)
    if not ops.traced() and type(call.q) is Tensor:
        decode.check_layouts(call)
    return window


def _rows_of(q, k_cache, cache_batch_idx, block_table):
    """A block table: the caller's, or of rows of the caches as pages; None where sequence s has row s."""
    if cache_batch_idx is None:
        if block_table is not None:
            check.tensor(f"{KVCACHE}: block_table", block_table)
            check.shape(f"{KVCACHE}: block_table", block_table, (q.shape[0], None))
            check.dtype(f"{KVCACHE}: block_table", block_table, ("int32",))
        return block_table
    if block_table is not None:
        raise ValueError(f"{KVCACHE}: cache_batch_idx and block_table are given, expected one of them")
    check.dtype(f"{KVCACHE}: cache_batch_idx", cache_batch_idx, ("int32", "int64"))
    check.shape(f"{KVCACHE}: cache_batch_idx", cache_batch_idx, (q.shape[0],))
    rows = k_cache.shape[0]
    return cache_batch_idx.where(cache_batch_idx >= 0, rows).clamp(max=rows).to(torch.int32)[:, None]


def _lengths(cache_seqlens, q, default):
    """(B,) int32."""
    if isinstance(cache_seqlens, Tensor):
        check.dtype(f"{KVCACHE}: cache_seqlens", cache_seqlens, ("int32",))
        check.shape(f"{KVCACHE}: cache_seqlens", cache_seqlens, (q.shape[0],))
        return cache_seqlens
    if cache_seqlens is None:
        if default is None:
            raise ValueError(f"{KVCACHE}: cache_seqlens is None, expected where the new keys go, with k and v")
        cache_seqlens = default
    if not isinstance(cache_seqlens, numbers.Integral) or isinstance(cache_seqlens, bool):
        raise TypeError(f"{KVCACHE}: cache_seqlens is a {type(cache_seqlens).__name__}, allowed are an int, a tensor "
                        "of int32 and None")
    if not 0 <= cache_seqlens < 1 << 31:
        raise ValueError(f"{KVCACHE}: cache_seqlens is {cache_seqlens}, allowed are 0 to 2^31 - 1")
    return torch.full((q.shape[0],), int(cache_seqlens), dtype=torch.int32, device=q.device)


def _append(q, k, v, caches, lengths, rotary, several_positions):
    """Write the new keys; q, rotated where there are angles. caches: of keys, of values, and the pages' table."""
    k_cache, v_cache, table = caches
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check.dtype(f"{KVCACHE}: {name}", tensor, ("bf16", "fp16"))
        check.rank(f"{KVCACHE}: {name}", tensor, 4)
        check.shape(f"{KVCACHE}: {name}", tensor, (q.shape[0], k.shape[1], *cache.shape[2:]))
        if tensor.dtype != cache.dtype:
            raise TypeError(f"{KVCACHE}: {name} is {tensor.dtype}, {name}_cache is {cache.dtype}")
    if not table.shape[1]:
        raise ValueError(f"{KVCACHE}: block_table is {tuple(table.shape)}, expected a page or more for new keys")
    positions = lengths.long()[:, None] + torch.arange(k.shape[1], device=q.device)
    slots = _slots(positions, table, k_cache.shape[1]).flatten()
    flat = (k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots)
    cos, sin, interleaved = rotary
    if (cos is None) != (sin is None):
        raise ValueError(f"{KVCACHE}: rotary_{'sin' if cos is None else 'cos'} is given alone, expected rotary_cos and "
                         "rotary_sin, or neither")
    if cos is None:
        kv_append(*flat)
        return q
    if q.shape[1] != k.shape[1] or (q.shape[1] > 1 and not several_positions):
        raise NotImplementedError(f"{KVCACHE}: rotary_cos with {q.shape[1]} queries and {k.shape[1]} new keys, "
                                  f"{'' if several_positions else 'neither '}causal or a window: supported are as many "
                                  "queries as new keys, and where they are several, causal or a window")
    try:
        turned = kv_append(*flat, cos=cos, sin=sin, interleaved=interleaved, positions=positions.flatten(),
                           q=q.flatten(0, 1))
    except (TypeError, ValueError, NotImplementedError) as error:  # by the names that the caller has
        words = re.sub(r"\b(cos|sin)\b", r"rotary_\1", str(error).replace("kv_append", KVCACHE))
        raise type(error)(words) from None
    return turned.view(q.shape)


def _slots(positions, table, page):
    """Of each position of each sequence (B, S); -1 where the table has no page for it."""
    block = positions.div(page, rounding_mode="floor")
    pages = table.long().gather(1, block.clamp(0, table.shape[1] - 1))
    there = (positions[:, :1] >= 0) & (block < table.shape[1]) & (pages >= 0)
    return torch.where(there, pages * page + positions % page, -1)


def _parts(what, packed, rank, n):
    check.tensor(what, packed)
    check.rank(what, packed, rank)
    if packed.shape[-3] != n:
        raise ValueError(f"{what} has the shape {tuple(packed.shape)}, expected {n} in the dimension before the heads")
    return packed.unbind(-3)


def _refuse(name, dropout_p, alibi_slopes, **others):
    if dropout_p is not None and (isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real)):
        raise TypeError(f"{name}: dropout_p is a {type(dropout_p).__name__}, allowed is 0.0")
    if dropout_p != 0.0:
        raise NotImplementedError(f"{name}: dropout_p is {dropout_p!r}, supported is 0.0 (softmax_scale is given by "
                                  "name)")
    if alibi_slopes is not None:
        raise NotImplementedError(f"{name}: alibi_slopes is given, supported is None: tkq.flex_attention has ALiBi")
    for argument, value in others.items():
        if value is not None:
            raise NotImplementedError(f"{name}: {argument} is given, supported is None")


def _results(found):
    return (*found, None) if isinstance(found, tuple) else found
