"""mla_decode on the GPU against float64: pages of any size and order, NaN wherever no key is."""
import math

import pytest
import torch

import tkq
from tests.helpers.attention.kv_cache import ENDS, queries
from tests.helpers.attention.mla import SCALE, apart, call, compare, judge_all, make, rising
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.attention.decode.launch import make_plan
from tkq.attention.decode.planned import Planned
from tkq.reference import decode as plans
from tkq.reference import mla as reference

LENGTHS = [*ENDS, 63, 64, 65, 257]


@pytest.mark.parametrize("page, heads", [(64, 16), (16, 128), (1, 8), (8, 40), (256, 128)])
def test_pages(page, heads):
    """With gaps between rows, and other ones between pages."""
    cache = make(LENGTHS, page)
    with poisoned():
        compare(queries(len(LENGTHS), 1, heads, 576), cache._replace(k=apart(cache.k)), f"pages of {page}")


@pytest.mark.parametrize("lengths, heads", [([65536 + 3], 128), ([8192], 8), ([30000], 16), ([3000, 2999, 1], 100),
                                            ([300] * 140, 16), ([40000, *[1400] * 50], 16), ([1500] * 33, 128)])
def test_work_that_blocks_share(lengths, heads):
    """One long sequence, whose parts are merged; more tasks than SMs; a task of many parts beside tasks of two and
    three, that begin anywhere in a part; sequences of two parts each."""
    with poisoned():
        compare(queries(len(lengths), 1, heads, 576), make(lengths, 64), "shared")


@pytest.mark.parametrize("rows, heads, page, causal", [(2, 128, 64, True), (4, 16, 16, True), (8, 20, 16, True),
                                                       (3, 7, 16, True), (5, 16, 16, False)])
def test_queries_that_see_other_keys(rows, heads, page, causal):
    """Several queries, some before the first key."""
    lengths = [0, 1, 3, 64, 130, 1000, 2500]
    with poisoned():
        compare(queries(len(lengths), rows, heads, 576), make(lengths, page), f"{rows} queries", causal=causal)


@pytest.mark.parametrize("lengths", [[4096] * 56, [70000, 0, 5, -3, *range(1, 9000, 100)], [(1 << 31) - 1, 7]])
def test_plans(lengths):
    """The kernel's words are the reference's."""
    of = Planned.made((576, 512), (128, 1), (len(lengths), 1), False)
    parts, seqlens = of.parts(torch.cuda.get_device_properties(0).multi_processor_count), torch.tensor(lengths).int()
    assert of.balanced(len(lengths), parts)
    assert torch.equal(make_plan(seqlens.cuda(), of).cpu(), plans.plan_decode(seqlens, None, of, parts))


def test_half_precision():
    lengths = [1, 64, 1000, 0, 777, 3000]
    with poisoned():
        compare(queries(len(lengths), 1, 16, 576, torch.float16), make(lengths, 24, torch.float16), "fp16")


@pytest.mark.parametrize("scale", [1e-4, 40.0])
def test_scales(scale):
    """Rows of equal weights, and rows of one key."""
    compare(queries(2, 1, 16, 576) * scale, make([700, 5000], 16), f"scale {scale}", softmax_scale=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_scores_that_rise(noise):
    """By so many powers of two with each block of 64 keys, in parts of 16 blocks: around the 8 by which they may
    without rescaled sums, by more than floats can hold, and down; each alone, and beside each other in a tile. Without
    noise all keys of a block weigh the same. Every second head's first block, and a third of the others, is -inf; pages
    are skipped too."""
    steps = torch.tensor([0.5, 7.9375, 8, 8.0625, 8.5, 40, -40, 0])
    cache = rising(make([2048, 1000, 65, 1025], 64), 64)
    for step in (*steps, steps.repeat(16)):
        q = queries(4, 1, 128, 576) * noise
        q[..., 512], q[..., 513] = step.cuda(), torch.tensor([0, 2], device="cuda").repeat(64)
        given = dict(softmax_scale=math.log(2), batch_invariant=True)
        with poisoned():
            compare(q, cache, f"by {step.tolist()}", **given)
    table, keys = cache.table.clone(), [(k[64:], v[64:]) for k, v in cache.keys]
    table[:, 0] = -1
    o, lse = call(q, cache._replace(table=table), **given)
    judge_all(o, lse, q, cache._replace(keys=keys), "without the first page", **given)


def test_fixed_splits_do_not_depend_on_the_batch():
    lengths = [5000, 1024, 1025, 3, 0, 9000]
    with poisoned():
        cache, q = make(lengths, 64), queries(len(lengths), 1, 70, 576)
        o, lse = compare(q, cache, "fixed", batch_invariant=True)
        for b in (0, 2, 5):
            pages = max(1, math.ceil(lengths[b] / 64))  # that a table of this sequence alone has
            one = cache._replace(table=cache.table[b:b + 1, :pages].contiguous(), lengths=cache.lengths[b:b + 1])
            found = call(q[b:b + 1], one, batch_invariant=True)
            assert torch.equal(found[0], o[b:b + 1]) and torch.equal(found[1], lse[b:b + 1])


@pytest.mark.parametrize("lengths, page", [([20000, 300, 7], 16), ([1500] * 33, 64)])
def test_the_same_bits_in_every_run(lengths, page):
    """Of many parts of a sequence, and of two."""
    cache, q = make(lengths, page), queries(len(lengths), 1, 128, 576)
    first = call(q, cache)
    for _ in range(20):
        again = call(q, cache)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


def test_a_graph_whose_lengths_grow():
    cache, q = make([900, 40, 260], 16), queries(3, 1, 16, 576)
    lengths = torch.tensor([100, 1, 255], device="cuda", dtype=torch.int32)
    plan = tkq.plan_decode(lengths, 16, 1, 576, head_dim_v=512)
    given = dict(q=q, kv_cache=cache.k[:, :, 0], block_table=cache.table, cache_seqlens=lengths, softmax_scale=SCALE,
                 plan=plan, return_lse=True)
    tkq.mla_decode(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tkq.plan_decode(lengths, 16, 1, 576, head_dim_v=512, out=plan)
        layers = [tkq.mla_decode(**given) for _ in range(2)]
    for _ in range(3):
        lengths += torch.tensor([200, 13, 1], device="cuda", dtype=torch.int32)
        graph.replay()
        o, lse = tkq.mla_decode(**dict(given, plan=None))
        for layer in layers:
            assert torch.equal(layer[0], o) and torch.equal(layer[1], lse)
        truth, _ = reference.mla_decode(q.double(), cache.k.double(), cache.table, lengths, SCALE)
        torch.testing.assert_close(o.double(), truth, rtol=0.02, atol=0.02)
    tkq.check_plan(plan)


@pytest.mark.parametrize("page, heads", [(16, 16), (64, 128)])
def test_pages_that_are_skipped(page, heads):
    """Keys of a page -1 are as if they were not there; those of other sequences stay."""
    cache, q = make([100, 1000, page], page), queries(3, 1, heads, 576)
    table = cache.table.clone()
    table[1, 3:5], table[2, :1] = -1, -1
    o, lse = call(q, cache._replace(table=table))
    truth, true_lse = reference.mla_decode(q.double(), cache.k.double(), table, cache.lengths, SCALE)
    torch.testing.assert_close(o.double(), truth, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse, true_lse, rtol=1e-4, atol=1e-4)
    assert not o[2].any() and (lse[2] == -math.inf).all()


@pytest.mark.parametrize("what, words", [
    ("length", "a length is negative"), ("beyond", "beyond the cache"), ("page", "neither -1 nor one"),
    ("stale", "not the one planned"), ("other", "another call")])
@pytest.mark.parametrize("fixed", [False, True])
def test_what_lies_gives_nan(what, words, fixed):
    """And nothing else does; a plan of another call gives it all over."""
    cache, q = make([100, 20000, 40], 16), queries(3, 1, 16, 576)
    whole, _ = call(q, cache, batch_invariant=fixed)
    lengths, table, planned, heads = cache.lengths.clone(), cache.table.clone(), cache.lengths.clone(), 16
    if what == "length":
        lengths[1] = planned[1] = -5
    elif what == "beyond":
        lengths[1] = planned[1] = 1 << 24
    elif what == "page":
        table[1, 700] = 4000
    elif what == "stale":
        lengths[1] += 1
    else:
        heads = 8
    plan = tkq.plan_decode(planned, heads, 1, 576, head_dim_v=512, batch_invariant=fixed)
    o, lse = tkq.mla_decode(q, cache.k, table, lengths, softmax_scale=SCALE, plan=plan, return_lse=True,
                            batch_invariant=fixed)
    with pytest.raises(ValueError, match=words):
        tkq.check_plan(plan)
    assert o[1].isnan().all() and lse[1].isnan().all()
    if what == "other":
        assert o.isnan().all() and lse.isnan().all()
    else:
        torch.testing.assert_close(o[[0, 2]], whole[[0, 2]], rtol=0.02, atol=0.02)
