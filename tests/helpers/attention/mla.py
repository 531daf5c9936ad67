"""What the tests of MLA on a GPU share: latent caches, calls, and the judgement of each query by itself."""
import math

import torch

import tkq
from tests.helpers.attention import kv_cache
from tests.helpers.attention.inputs import judge

SCALE = 192 ** -0.5


def make(lengths, page, dtype=torch.bfloat16, seed=0):
    """A cache of latent rows, pages in any order, NaN wherever no key is; values are keys' first columns."""
    cache = kv_cache.make(lengths, page, 1, 576, dtype=dtype, seed=seed)
    return cache._replace(keys=[(k, k[..., :512]) for k, _ in cache.keys])


def apart(k):
    """The same pages (N, page, .., columns), with NaN between their rows and rows of NaN between them."""
    shape = k.shape[0], k.shape[1] + 3, *k.shape[2:-1], k.shape[-1] + 32
    wide = torch.full(shape, 0xFF if k.dtype == torch.uint8 else math.nan, device="cuda", dtype=k.dtype)
    found = wide[:, :k.shape[1], ..., 16:16 + k.shape[-1]]
    found.copy_(k)
    return found


def rising(cache, page):
    """The same cache, but column 512 says which block of 64 keys a row is in, and column 513 is 0, or so low that twice
    of it is -inf in fp32: in all rows of the first block, and in a third of the others."""
    for (k, _), table in zip(cache.keys, cache.table):
        place = torch.arange(len(k), device="cuda")
        k[:, 0, 512] = (place // 64).to(k.dtype)
        k[:, 0, 513] = torch.where((place < 64) | (place % 3 == 2), -3e38, 0.0).to(k.dtype)
        cache.k[table[place // page].long(), place % page] = k
    return cache


def call(q, cache, **options):
    """(o, lse), planned ahead."""
    plan = tkq.plan_decode(cache.lengths, q.shape[2], 1, 576, head_dim_v=512, max_seqlen_q=q.shape[1],
                           batch_invariant=options.get("batch_invariant", False))
    out = torch.full((*q.shape[:3], 512), math.nan, device="cuda", dtype=q.dtype)
    options = dict(softmax_scale=SCALE) | options
    o, lse = tkq.mla_decode(q, cache.k, cache.table, cache.lengths, plan=plan, return_lse=True, out=out, **options)
    tkq.check_plan(plan)
    return o, lse


def judge_all(o, lse, q, cache, what="", **options):
    """Each query against float64, beside PyTorch at the same precision: its heads are rows of one head, over the keys
    that it sees."""
    scale, causal = options.get("softmax_scale", SCALE), options.get("causal", True)
    for b, (k, v) in enumerate(cache.keys):
        for i in range(q.shape[1]):
            seen = len(k) - q.shape[1] + i + 1 if causal else len(k)
            if seen <= 0:
                assert not o[b, i].any() and (lse[b, :, i] == -math.inf).all(), f"{what} {b}, {i}: no key"
                continue
            judge(o[b, None, i, :, None], lse[b, None, None, :, i], q[b, None, i, :, None], k[None, :seen],
                  v[None, :seen], f"{what} sequence {b} of {len(k)}, query {i}", softmax_scale=scale)


def compare(q, cache, what="", **options):
    o, lse = call(q, cache, **options)
    judge_all(o, lse, q, cache, what, **options)
    return o, lse
