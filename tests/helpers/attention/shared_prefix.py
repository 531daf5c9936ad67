"""Caches whose sequences begin with the same pages, for the tests of cascade_attention on a GPU."""
import math

import torch

import tkq
from tests.helpers.attention.inputs import judge
from tests.helpers.attention.kv_cache import BF16, Cache, make


def share(prefix, lengths, page, heads, dim, dim_v=None, dtype=BF16, layout="pages") -> Cache:
    """Whole pages of the prefix are those of all sequences, whose lengths count them. As `kv_cache.make` has it: pages
    in any order, NaN wherever no key is, entries of the table behind a sequence's end that name no page."""
    shared = prefix // page * page
    cache = make([shared, *(max(length - shared, 0) for length in lengths)], page, heads, dim, dim_v, dtype, layout)
    first = cache.table[:1, :shared // page].expand(len(lengths), -1)
    keys = [tuple(torch.cat(x)[:length] for x in zip(cache.keys[0], own)) for length, own in zip(lengths,
                                                                                                  cache.keys[1:])]
    return Cache(cache.k, cache.v, torch.cat((first, cache.table[1:]), 1),
                 torch.tensor(lengths, device="cuda", dtype=torch.int32), keys)


def plan_of(q, cache, prefix, cascade=True, **more):
    """more: cu_seqlens_q, batch_invariant, causal."""
    ragged = more.get("cu_seqlens_q") is not None
    sizes = dict(total_q=q.shape[0]) if ragged else dict(max_seqlen_q=q.shape[1])
    return tkq.plan_cascade(cache.lengths, q.shape[-2], cache.k.shape[2], q.shape[-1], prefix_len=prefix,
                            page_size=cache.k.shape[1], head_dim_v=cache.v.shape[3], cascade=cascade, **sizes, **more)


def attend(q, cache, plan, **options):
    """(o, lse); o in memory of NaN."""
    out = torch.full((*q.shape[:-1], cache.v.shape[3]), math.nan, device="cuda", dtype=q.dtype)
    return tkq.cascade_attention(q, cache.k, cache.v, block_table=cache.table, plan=plan, return_lse=True, out=out,
                                 **options)


def check_plans(plan):
    for made in (plan.plan, plan.prefix_plan):
        if made is not None:
            tkq.check_plan(made)


def judge_each(o, lse, q, cache, what="", which=None, **options):
    """Each sequence that has keys against float64, beside PyTorch at the same precision."""
    options.pop("batch_invariant", None)
    for name in ("k_descale", "v_descale"):  # keys are what a cache's numbers mean
        options.pop(name, None)
    for b, (k, v) in enumerate(cache.keys):
        if len(k) and (which is None or b in which):
            judge(o[b:b + 1], lse[b:b + 1], q[b:b + 1], k[None], v[None], f"{what} sequence {b} of {len(k)}",
                  **(dict(causal=True) | options))


def compare(q, cache, prefix, what="", **options):
    plan = plan_of(q, cache, prefix, batch_invariant=options.get("batch_invariant", False),
                   causal=options.get("causal", True))
    o, lse = attend(q, cache, plan, **options)
    check_plans(plan)
    judge_each(o, lse, q, cache, f"{what} prefix {prefix}", **options)
    return o, lse
