"""flash_attn_with_kvcache with tree masks on the GPU against float64: drafts around the ends of blocks and pages."""
import math

import pytest
import torch

import tkq
from tests.helpers.attention import trees
from tests.helpers.attention.float8_cache import float8
from tests.helpers.attention.kv_cache import call, make, queries
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.testing import assert_2x

FP16 = torch.float16
ENDS = [0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 4000]  # keys before the drafts: around the ends of blocks


def judge(o, lse, q, cache, masks, what="", **options):
    """Each sequence against float64, beside PyTorch at the same precision."""
    for name in ("k_descale", "v_descale", "batch_invariant"):  # keys are what a cache's numbers mean
        options.pop(name, None)
    for b, (k, v) in enumerate(cache.keys):
        seen = trees.visible(masks[b].cpu(), len(k))
        truth, true_lse = trees.attention(q[b], k, v, seen, **options)
        low, _ = trees.attention(q[b], k, v, seen, dtype=q.dtype, **options)
        assert_2x(o[b], truth, low, what=f"{what} sequence {b} of {len(k)}")
        near = dict(rtol=1e-5, atol=1e-5 if not options.get("softcap") else 2**-11 * options["softcap"])
        torch.testing.assert_close(lse[b].double(), true_lse, **near, msg=lambda text, b=b: f"{what} {b}: {text}")


def compare(q, cache, masks, what="", **options):
    o, lse = call(q, cache, tree_mask=masks, **options)
    judge(o, lse, q, cache, masks, what, **options)
    return o, lse


@pytest.mark.parametrize("rows, heads, dim", [(1, (8, 2), 128), (4, (8, 2), 128), (7, (6, 2), 64), (64, (8, 2), 64),
                                              (64, (2, 2), 128), (63, (70, 1), 128), (33, (16, 1), 256)])
def test_trees(rows, heads, dim):
    """Random trees, behind any number of keys: one tile and many; blocks of 64 and of 128 keys."""
    lengths = [rows + n for n in ENDS]
    with poisoned():
        cache, masks = make(lengths, 16, heads[1], dim), trees.masks(len(lengths), rows, device="cuda")
        compare(queries(len(lengths), rows, heads[0], dim), cache, masks, f"{rows} drafts of {heads} heads")


@pytest.mark.parametrize("page, layout, dtype", [(1, "pages", FP16), (7, "heads", FP16), (64, "pairs", torch.bfloat16),
                                                 pytest.param(4096, "rows", torch.bfloat16, marks=pytest.mark.slow)])
def test_caches(page, layout, dtype):
    """Softcap and sinks; sequences with fewer keys than drafts."""
    lengths, sinks = [16, 3, 0, 100, 1000, 3000], torch.linspace(-2, 2, 8, device="cuda")
    with poisoned():
        cache = make(lengths, page, 2, 128, dtype=dtype, layout=layout)
        compare(queries(len(lengths), 16, 8, 128, dtype), cache, trees.masks(len(lengths), 16, device="cuda"),
                f"{layout} of {page}", softcap=20.0, sinks=sinks)


@pytest.mark.parametrize("scale", [1e-4, 40.0])
@poisoned()
def test_scales(scale):
    """Rows of equal weights, and rows of one key."""
    compare(queries(2, 20, 8, 128) * scale, make([700, 5000], 16, 2, 128), trees.masks(2, 20, device="cuda"),
            f"scale {scale}")


@pytest.mark.parametrize("rows, scales", [
    (1, "head"), (2, "token"), pytest.param(20, "sequence", marks=pytest.mark.slow), (20, "token")])
def test_float8_caches(rows, scales):
    """Also of as few packed queries as have a kernel of their own without masks."""
    with poisoned():
        cache, descales = float8(make([rows + n for n in ENDS], 16, 2, 128), scales)
        compare(queries(len(ENDS), rows, 8, 128), cache, trees.masks(len(ENDS), rows, device="cuda"),
                f"float8 {scales}", **descales)


def test_masks_of_any_bits():
    """Queries that see nothing of the drafts, or nothing at all; bits behind the last draft mean nothing; a strided
    mask; causal has no part."""
    lengths, rows = [64, 10, 300, 5], 5
    cache, q = make(lengths, 16, 2, 128), queries(4, rows, 8, 128)
    masks = torch.randint(0, 1 << rows, (4, rows), generator=torch.Generator().manual_seed(0))
    masks[:, 1], masks[:, 3] = 0, (1 << rows) - 1
    with poisoned():
        o, lse = compare(q, cache, masks.cuda(), "any bits")
        assert not o[3, 1].any() and (lse[3, :, 1] == -math.inf).all()
        high = (masks | -(1 << rows)).cuda()
        strided = torch.stack((high, torch.zeros_like(high)), -1).transpose(0, 1).contiguous().transpose(0, 1)[..., 0]
        for given in (dict(tree_mask=high), dict(tree_mask=strided), dict(tree_mask=high, causal=False)):
            again = call(q, cache, **given)
            assert torch.equal(again[0], o) and torch.equal(again[1], lse)


@poisoned()
def test_the_same_bits_in_every_run_and_batch():
    """Work that blocks share, of several tiles; fixed splits."""
    lengths = [20000, 70, 3000]
    cache, q, masks = make(lengths, 16, 2, 128), queries(3, 40, 8, 128), trees.masks(3, 40, device="cuda")
    for fixed in (False, True):
        first = compare(q, cache, masks, f"fixed {fixed}", batch_invariant=fixed)
        for _ in range(10):
            again = call(q, cache, tree_mask=masks, batch_invariant=fixed)
            assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
        for b in range(3 * fixed):
            one = cache._replace(table=cache.table[b:b + 1], lengths=cache.lengths[b:b + 1])
            found = call(q[b:b + 1], one, tree_mask=masks[b:b + 1], batch_invariant=True)
            assert torch.equal(found[0], first[0][b:b + 1]) and torch.equal(found[1], first[1][b:b + 1])


@poisoned()
def test_a_graph_whose_lengths_and_trees_change():
    cache, q = make([900, 40, 260], 16, 2, 128), queries(3, 8, 8, 128)
    lengths, masks = torch.tensor([100, 9, 247], device="cuda", dtype=torch.int32), trees.masks(3, 8, device="cuda")
    plan = tkq.plan_decode(lengths, 8, 2, 128, max_seqlen_q=8)
    given = dict(cache.arguments(), cache_seqlens=lengths, tree_mask=masks, return_lse=True)
    tkq.flash_attn_with_kvcache(q, **given, plan=plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tkq.plan_decode(lengths, 8, 2, 128, max_seqlen_q=8, out=plan)
        o, lse = tkq.flash_attn_with_kvcache(q, **given, plan=plan)
    for step in range(3):
        lengths += torch.tensor([200, 10, 4], device="cuda", dtype=torch.int32)
        masks.copy_(trees.masks(3, 8, seed=step + 1))
        graph.replay()
        want, of = tkq.flash_attn_with_kvcache(q, **given)
        assert torch.equal(o, want) and torch.equal(lse, of)
        keys = [tuple(x[:length] for x in own) for own, length in zip(cache.keys, lengths.tolist())]
        judge(o, lse, q, cache._replace(keys=keys), masks, f"step {step}")
    tkq.check_plan(plan)


@pytest.mark.parametrize("length", [-3, 1 << 20])
def test_lengths_that_lie_give_nan(length):
    cache, q, masks = make([100, 2000, 40], 16, 2, 128), queries(3, 8, 8, 128), trees.masks(3, 8, device="cuda")
    cache.lengths[1] = length
    plan = tkq.plan_decode(cache.lengths, 8, 2, 128, max_seqlen_q=8)
    o, lse = tkq.flash_attn_with_kvcache(q, **cache.arguments(), tree_mask=masks, plan=plan, return_lse=True)
    with pytest.raises(ValueError, match="a length is negative"):
        tkq.check_plan(plan)
    assert o[1].isnan().all() and lse[1].isnan().all()
    for b in (0, 2):
        k, v = cache.keys[b]
        truth, _ = trees.attention(q[b], k, v, trees.visible(masks[b].cpu(), len(k)))
        torch.testing.assert_close(o[b].double(), truth, rtol=0.02, atol=0.02)
