"""From torch tensors to the launch of chunked prefill."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.attention.decode.chunked.plan import cache_plan, groups_apart, many_queries, packed_heads, plan, takes
from tkq.attention.decode.chunked.spec import CacheSpec
from tkq.attention.forward.config import AttentionConfig
from tkq.attention.forward.spec import LONG_WINDOW, AttentionSpec
from tkq.runtime import Recipe
from tkq.runtime.call import dtypes


def recipe(spec: AttentionSpec, cache: CacheSpec, config: AttentionConfig | None = None) -> Recipe:
    """The kernel's, with its planned config or another one."""
    return Recipe("tkq.attention.decode.chunked.kernel:ChunkedPrefill", (spec, cache, config or plan(spec, cache)))


def serves(call, options, out: Tensor) -> bool:
    """Is it this kernel's? call, options: of `decode.check`, looked at. out: what is written."""
    q, k, v, seqlens, table = call[:5]
    (*_, H, D), ragged = q.shape, call.cu_seqlens_q is not None
    queries, sequences = (q.shape[0], seqlens.shape[0]) if ragged else (q.shape[0] * q.shape[1], q.shape[0])
    return (many_queries((D, v.shape[3]), (H, k.shape[2]), queries, sequences) and not options.batch_invariant
            and call.tree_mask is None and k.dtype == q.dtype and k.numel() > 0 and sinks_of(call.sinks, q.dtype)
            and (table is None or takes(k.shape[1]))
            and (ragged or (behind_each_other(q) and behind_each_other(out))))


def behind_each_other(x: Tensor) -> bool:
    """Are the rows of x (B, S, H, D) as far apart from one sequence to the next as inside of one?"""
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def kernel_of(call, options) -> Recipe:
    """Of a call that it `serves`."""
    q, k, v, _, table, sinks = call[:6]
    left = options.left >= 0
    spec = AttentionSpec(dtypes.name_of(q.dtype), q.shape[-1], options.causal or options.right == 0,
                         options.return_lse, v.shape[3], left, not options.causal and options.right > 0,
                         options.softcap > 0, None if sinks is None else dtypes.name_of(sinks.dtype), True,
                         pack=packed_heads(q.shape[-2] // k.shape[2]),
                         long_window=left and options.left >= LONG_WINDOW)
    page = None if table is None else k.shape[1]
    return recipe(spec, cache_plan(spec, page, call.cu_seqlens_q is not None, multiples_apart(k, v)))


def multiples_apart(k: Tensor, v: Tensor) -> bool:
    """Are pages of K and of V the same multiple of 8 rows apart, see `plan.groups_apart`?"""
    apart = groups_apart(k.shape, k.stride())
    return apart is not None and apart == groups_apart(v.shape, v.stride())


def sinks_of(sinks: Tensor | None, dtype: torch.dtype) -> bool:
    """Does the forward take sinks of this type beside q's?"""
    return sinks is None or sinks.dtype in (torch.float32, dtype)
