"""What the tests of MLA over lists of rows on a GPU share: lists, calls, and the judgement of each query by itself."""
import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

import tkq
from tests.helpers.attention.inputs import judge
from tests.helpers.attention.mla import SCALE
from tkq.reference.mla import unpacked


class Lists(NamedTuple):
    """cache (N, page, 576); indices (B, Sq, topk); lengths (B,), (B, Sq) or None."""

    cache: Tensor
    indices: Tensor
    lengths: Optional[Tensor]


def make(batch, rows, topk, page, lengths, dtype=torch.bfloat16, seed=0) -> Lists:
    """Lists of some of 777 rows that have numbers, in pages of any order; all other rows are NaN. A tenth of the
    indices is -1, as is the end of each list. lengths: of "sequences", of "queries" or None."""
    g = torch.Generator("cuda").manual_seed(seed)
    pages = -(-2000 // page)
    cache = torch.full((pages * page, 576), math.nan, device="cuda", dtype=dtype)
    there = torch.randperm(pages * page, device="cuda", generator=g)[:777]
    cache[there] = torch.randn(777, 576, device="cuda", generator=g).to(dtype)
    indices = there[torch.randint(0, 777, (batch, rows, topk), device="cuda", generator=g)].int()
    indices[torch.rand(batch, rows, topk, device="cuda", generator=g) < 0.1] = -1
    indices[..., topk - topk // 8:] = -1
    shape = {"sequences": (batch,), "queries": (batch, rows), None: None}[lengths]
    if shape is not None:
        lengths = torch.randint(0, topk + 1, shape, device="cuda", generator=g).int()
    return Lists(cache.view(pages, page, 576), indices, lengths)


def with_ends(lists, ends):
    """The same, and the first of the lists have these lengths, as far as they have room."""
    if lists.lengths is None:
        return lists
    lengths = lists.lengths.clone()
    few = torch.tensor(ends, device="cuda", dtype=torch.int32).clamp(max=lists.indices.shape[2])
    lengths.view(-1)[:len(few)] = few[:lengths.numel()]
    return lists._replace(lengths=lengths)


def of_queries(lists) -> Tensor:
    """(B, Sq) int32."""
    shape, lengths = lists.indices.shape[:2], lists.lengths
    if lengths is None:
        return lists.indices.new_full(shape, lists.indices.shape[2])
    return (lengths if lengths.dim() == 2 else lengths[:, None]).expand(shape)


def call(q, lists, **options):
    """(o, lse), planned ahead."""
    fixed = options.get("batch_invariant", False)
    plan = tkq.plan_decode(of_queries(lists).flatten(), q.shape[2], 1, 576, head_dim_v=512, batch_invariant=fixed)
    out = torch.full((*q.shape[:3], 512), math.nan, device="cuda", dtype=q.dtype)
    found = tkq.mla_decode(q, lists.cache, softmax_scale=SCALE, indices=lists.indices, topk_length=lists.lengths,
                           plan=plan, return_lse=True, out=out, **options)
    tkq.check_plan(plan)
    return found


def compare(q, lists, **options):
    """Each query against float64, beside PyTorch at the same precision: its heads are rows of one head."""
    o, lse = call(q, lists, **options)
    rows, lengths = lists.cache.flatten(0, 1), of_queries(lists).tolist()
    if rows.dtype == torch.uint8:  # float8 rows, as kernels take them
        rows = unpacked(rows).bfloat16()
    judged = {(b, i) for b in range(q.shape[0]) for i in range(q.shape[1])}
    for b, i in sorted(judged)[::max(1, len(judged) // 24)]:
        listed = lists.indices[b, i, :lengths[b][i]]
        k = rows[listed[listed >= 0].long()][None, :, None]
        if not k.shape[1]:
            assert not o[b, i].any() and (lse[b, :, i] == -math.inf).all(), f"{b}, {i}: no key"
            continue
        judge(o[b, None, i, :, None], lse[b, None, None, :, i], q[b, None, i, :, None], k, k[..., :512],
              f"query {i} of sequence {b}, {k.shape[1]} keys", softmax_scale=SCALE)
    assert not o.isnan().any() and not lse.isnan().any()
    return o, lse
