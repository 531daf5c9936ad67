"""What the tests of attention over a cache on a GPU share: caches of any layout, NaN wherever no key is, and the
judgement of each sequence by itself."""
import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

import tkq
from tests.helpers.attention.inputs import judge

BF16 = torch.bfloat16
ENDS = [0, 1, 15, 16, 17, 127, 128, 129, 500, 4000]  # around the ends of pages and blocks


class Cache(NamedTuple):
    """k, v and table as a call takes them; keys: [(L, Hk, D), (L, Hk, Dv)] of each sequence."""

    k: Tensor
    v: Tensor
    table: Optional[Tensor]
    lengths: Tensor
    keys: list

    def arguments(self) -> dict:
        return dict(k_cache=self.k, v_cache=self.v, cache_seqlens=self.lengths, block_table=self.table)


def make(lengths, page, heads, dim, dim_v=None, dtype=BF16, layout="pages", seed=0) -> Cache:
    """layout: "pages" (N, page, Hk, D), in any order; "heads" first in memory; "pairs": K and V between each other;
    "apart": a row more between pages; "rows": without a table, page is a row's length."""
    g = torch.Generator("cuda").manual_seed(seed)
    new = lambda length, d: torch.randn(length, heads, d, device="cuda", generator=g).to(dtype)
    dims = dim, dim_v or dim
    keys = [tuple(new(length, d) for d in dims) for length in lengths]
    each = [-(-length // page) for length in lengths]
    pages = len(lengths) if layout == "rows" else sum(each) + 3
    nothing = lambda *shape: torch.full(shape, math.nan, device="cuda", dtype=dtype)
    if layout == "heads":
        k, v = (nothing(pages, heads, page, d).transpose(1, 2) for d in dims)
    elif layout == "apart":
        k, v = (nothing(pages, page + 1, heads, d)[:, :page] for d in dims)
    elif layout == "pairs":
        k, v = nothing(pages, 2, page, heads, dim).unbind(1)
    else:
        k, v = (nothing(pages, page, heads, d) for d in dims)
    if layout == "rows":
        for b, (length, of) in enumerate(zip(lengths, keys)):
            k[b, :length], v[b, :length] = of
        return Cache(k, v, None, _int(lengths), keys)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(lengths), max([1, *each]) + 2), 1 << 30, dtype=torch.int32)  # behind the end: no pages
    for b, (length, of) in enumerate(zip(lengths, keys)):
        for i in range(each[b]):
            table[b, i] = at = order.pop()
            rows = min(page, length - i * page)
            k[at, :rows], v[at, :rows] = (x[i * page:i * page + rows] for x in of)
    return Cache(k, v, table.cuda(), _int(lengths), keys)


def queries(batch, rows, heads, dim, dtype=BF16, seed=1):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(batch, rows, heads, dim, device="cuda", generator=g).to(dtype)


def call(q, cache, **options):
    """(o, lse), planned ahead."""
    window = options.get("window_size", (None, None))
    plan = tkq.plan_decode(cache.lengths, q.shape[2], cache.k.shape[2], q.shape[3], head_dim_v=cache.v.shape[3],
                           max_seqlen_q=q.shape[1], window_size=window,
                           batch_invariant=options.get("batch_invariant", False))
    out = torch.full((*q.shape[:3], cache.v.shape[3]), math.nan, device="cuda", dtype=q.dtype)
    o, lse = tkq.flash_attn_with_kvcache(q, **cache.arguments(), plan=plan, return_lse=True, out=out, **options)
    tkq.check_plan(plan)
    return o, lse


def judge_all(o, lse, q, cache, what="", **options):
    """Each sequence against float64, beside PyTorch at the same precision."""
    left, right = options.pop("window_size", (None, None))
    for name in ("batch_invariant", "k_descale", "v_descale"):  # keys are what a cache's numbers mean
        options.pop(name, None)
    options = dict(causal=options.pop("causal", True), left=-1 if left is None else left,
                   right=-1 if right is None else right, **options)
    for b, (k, v) in enumerate(cache.keys):
        if not len(k):
            assert not o[b].any() and (lse[b] == options.get("sinks", torch.tensor(-math.inf, device="cuda"))
                                       .float().view(-1, 1)).all(), f"{what} sequence {b} of no key"
            continue
        judge(o[b:b + 1], lse[b:b + 1], q[b:b + 1], k[None], v[None], f"{what} sequence {b} of {len(k)}", **options)


def compare(q, cache, what="", **options):
    o, lse = call(q, cache, **options)
    judge_all(o, lse, q, cache, what, **options)
    return o, lse


def _int(numbers):
    return torch.tensor(numbers, device="cuda", dtype=torch.int32)


# ---- ragged queries --------------------------------------------------------------------------------------------------


def starts(many, first=0):
    return torch.tensor([first, *many], dtype=torch.int32).cumsum(0).int().cuda()


def ask(q, cache, cu, plan=None, **options):
    """(o, lse, plan); NaN in rows that are not written."""
    if plan is None:
        plan = tkq.plan_decode(cache.lengths, q.shape[1], cache.k.shape[2], q.shape[2], head_dim_v=cache.v.shape[3],
                               window_size=options.get("window_size", (None, None)), cu_seqlens_q=cu,
                               total_q=q.shape[0], batch_invariant=options.get("batch_invariant", False))
    out = torch.full((*q.shape[:2], cache.v.shape[3]), math.nan, device="cuda", dtype=q.dtype)
    return *tkq.flash_attn_with_kvcache(q, **cache.arguments(), plan=plan, cu_seqlens_q=cu, return_lse=True, out=out,
                                        **options), plan


def judge_each(o, lse, q, cache, cu, which=None, left=-1):
    for b, (first, end) in enumerate(zip(cu.tolist(), cu[1:].tolist())):
        k, v = cache.keys[b]
        if first == end or (which is not None and b not in which):
            continue
        judge(o[None, first:end], lse[None, :, first:end], q[None, first:end], k[None], v[None],
              f"sequence {b}: {end - first} queries, {len(k)} keys", causal=True, left=left)
