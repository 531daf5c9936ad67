"""cascade_attention on the GPU against float64: prefixes around a page's end, permuted pages, NaN where no key is."""
import math

import pytest
import torch

import tkq
from tests.helpers.attention.float8_cache import float8
from tests.helpers.attention.inputs import judge
from tests.helpers.attention.kv_cache import queries
from tests.helpers.attention.shared_prefix import attend, check_plans, compare, judge_each, plan_of, share
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.reference import decode as reference

FP16 = torch.float16


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 64, 1000, 5000])
@pytest.mark.sampled(when=lambda prefix, rows: rows == 3 or prefix in (0, 16, 17, 1000))
def test_prefixes(prefix, rows):
    """Of pages of 16: sequences whose first query sees the prefix alone, and longer ones."""
    lengths = [prefix + rows - 1, prefix + rows, prefix + 63 + rows, prefix + 700, 6000]
    with poisoned():
        cache = share(prefix, lengths, 16, 2, 128)
        compare(queries(len(lengths), rows, 8, 128), cache, prefix)


@pytest.mark.parametrize("page, layout, heads", [(1, "pages", (2, 2)), (7, "heads", (8, 2)), (64, "pairs", (6, 1)),
                                                 (256, "pages", (70, 1))])
def test_pages_and_heads(page, layout, heads):
    """Groups of 1, 4, 6 and 70 query heads; softcap and sinks, which count once."""
    lengths, sinks = [1100, 2500, 1501], torch.linspace(-2, 9, heads[0], device="cuda")  # as much as all keys
    with poisoned():
        cache = share(1031, lengths, page, heads[1], 128, layout=layout)
        compare(queries(3, 2, heads[0], 128), cache, 1031, f"pages of {page}", softcap=20.0, sinks=sinks)


@pytest.mark.parametrize("dims, dtype", [((64, 64), FP16), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
    ((96, 96), torch.bfloat16), ((192, 128), torch.bfloat16), ((256, 256), FP16)))])
def test_head_dims(dims, dtype):
    with poisoned():
        cache = share(500, [501, 1000, 777], 24, 2, *dims, dtype)
        compare(queries(3, 2, 8, dims[0], dtype), cache, 500, f"{dims}", causal=False)


def test_keys_that_are_seen_without_a_mask():
    """Sequences of fewer keys than prefix and queries, where each query sees all; and without a prefix."""
    with poisoned():
        compare(queries(2, 4, 8, 128), share(16, [17, 40], 16, 2, 128), 16, "all keys", causal=False)
        compare(queries(2, 4, 8, 128), share(0, [2, 40], 16, 2, 128), 0, "no prefix")


@pytest.mark.parametrize("causal", [True, False])
def test_many_queries_share_a_prefix(causal):
    """So many that they have the kernel of chunked prefill, over the prefix or over what is behind it."""
    with poisoned():
        lengths = [2100 + 3 * b % 40 for b in range(260)]
        compare(queries(260, 1, 64, 128), share(2048, lengths, 16, 8, 128), 2048, "one query", causal=causal)
        compare(queries(3, 700, 8, 128), share(400, [1200, 1100, 2000], 64, 2, 128), 400, "700 queries", causal=causal)


@pytest.mark.parametrize("batch", [1, 2, 70, 300])
def test_batches(batch):
    """From one sequence to more packed queries than one tile has."""
    lengths = [2100 + 7 * b % 90 for b in range(batch)]
    with poisoned():
        compare(queries(batch, 1, 8, 128), share(2048, lengths, 64, 2, 128), 2048, f"{batch} sequences")


@pytest.mark.parametrize("scale", [1e-4, 40.0])
@poisoned()
def test_scales(scale):
    """Rows of equal weights, and rows of one key: in the prefix or behind it."""
    compare(queries(4, 1, 8, 128) * scale, share(900, [1500, 901, 2000, 1100], 16, 2, 128), 900, f"scale {scale}")


@pytest.mark.parametrize("scales", [pytest.param("head", marks=pytest.mark.slow), "token"])
def test_float8_caches(scales):
    """Scales are of slots of pages: those of a shared page, of all sequences."""
    lengths = [700, 1000, 513]
    with poisoned():
        whole = share(512, lengths, 16, 2, 128)
        # a sequence's own keys, and those that it shares, have the scales of their slots
        cache, descales = float8(whole, scales)
        compare(queries(3, 1, 8, 128), cache, 512, f"float8 {scales}", **descales)


def test_ragged_queries():
    lengths, many = [1500, 1201, 1233, 2000, 1300], [3, 1, 33, 0, 100]
    with poisoned():
        cache = share(1200, lengths, 16, 2, 128)
        starts = torch.tensor([2, *many], dtype=torch.int32).cumsum(0).int().cuda()
        q = queries(1, sum(many) + 6, 8, 128)[0]
        q[:2], q[-4:] = math.nan, math.nan
        plan = plan_of(q, cache, 1200, cu_seqlens_q=starts)
        o, lse = attend(q, cache, plan, cu_seqlens_q=starts)
    assert plan.shared == 1200
    check_plans(plan)
    assert o[:2].isnan().all() and o[-4:].isnan().all()
    for b, (first, end) in enumerate(zip(starts.tolist(), starts[1:].tolist())):
        if first < end:
            k, v = cache.keys[b]
            judge(o[None, first:end], lse[None, :, first:end], q[None, first:end], k[None], v[None], f"sequence {b}",
                  causal=True)


@poisoned()
def test_both_ways_have_one_meaning():
    """Read once and by each sequence; a plan made in the call; q that is a view of packed projections."""
    cache, packed = share(1000, [1100, 1001, 5000, 0], 16, 2, 128), queries(4, 2, 12, 128)
    q = packed[:, :1, :8]
    found = [attend(q, cache, plan_of(q, cache, 1000, cascade)) for cascade in (True, False)]
    given = dict(block_table=cache.table, cache_seqlens=cache.lengths, prefix_len=1000, return_lse=True)
    for cascade, (o, lse) in zip((True, False), found):
        judge_each(o, lse, q, cache, f"{cascade}")
        again = tkq.cascade_attention(q, cache.k, cache.v, cascade=cascade, **given)
        assert torch.equal(again[0][:3], o[:3]) and torch.equal(again[1][:3], lse[:3]) and again[0].isfinite().all()
    plain = tkq.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table)
    assert torch.equal(found[1][0], plain)


@poisoned()
def test_the_same_bits_in_every_run():
    cache, q = share(9000, [9100, 20000, 9005, 12000], 16, 2, 128), queries(4, 1, 8, 128)
    plan = plan_of(q, cache, 9000)
    first = attend(q, cache, plan)
    for _ in range(20):
        again = attend(q, cache, plan)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize("float8_", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fixed_splits_do_not_depend_on_the_batch(float8_):
    """Of float8 the queries of one sequence are few, those of all are not."""
    with poisoned():
        cache, q, descales = share(4096, [5000, 4097, 9000], 64, 2, 128), queries(3, 1, 8, 128), {}
        if float8_:
            cache, descales = float8(cache, "token")
        o, lse = compare(q, cache, 4096, "fixed", batch_invariant=True, **descales)
        for b in range(3):
            one = cache._replace(table=cache.table[b:b + 1], lengths=cache.lengths[b:b + 1])
            plan = plan_of(q[b:b + 1], one, 4096, batch_invariant=True)
            found = attend(q[b:b + 1], one, plan, batch_invariant=True, **descales)
            assert torch.equal(found[0], o[b:b + 1]) and torch.equal(found[1], lse[b:b + 1])


@poisoned()
def test_a_graph_whose_lengths_grow():
    cache, q = share(640, [1600, 700, 900], 16, 2, 128), queries(3, 1, 8, 128)
    lengths = torch.tensor([700, 641, 800], device="cuda", dtype=torch.int32)
    of = cache._replace(lengths=lengths)
    attend(q, of, plan_of(q, of, 640))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = plan_of(q, of, 640)
        layers = [attend(q, of, plan) for _ in range(2)]
    for _ in range(3):
        lengths += torch.tensor([300, 13, 1], device="cuda", dtype=torch.int32)
        graph.replay()
        o, lse = attend(q, of, plan_of(q, of, 640))
        for layer in layers:
            assert torch.equal(layer[0], o) and torch.equal(layer[1], lse)
        truth, _ = reference.flash_attn_with_kvcache(q.double(), cache.k.double(), cache.v.double(), lengths,
                                                     cache.table)
        torch.testing.assert_close(o.double(), truth, rtol=0.02, atol=0.02)
    check_plans(plan)


@pytest.mark.parametrize("cascade", [True, False])
@pytest.mark.parametrize("what, words, wrong", [
    ("short", "a length is negative", [1]), ("negative", "a length is negative", [1]),
    ("beyond", "beyond the cache", [1]), ("page", "neither -1 nor one", [1]),
    ("prefix", "neither -1 nor one", [0, 1, 2])])
def test_what_lies_gives_nan(what, words, wrong, cascade):
    """And nothing else does. In memory that was 0 before."""
    cache, q = share(640, [1600, 700, 900], 16, 2, 128), queries(3, 1, 8, 128)
    lengths, table = cache.lengths.clone(), cache.table.clone()
    if what == "page":
        table[1, 42] = cache.k.shape[0]
    elif what == "prefix":
        table[:, 3] = -2
    else:
        lengths[1] = {"short": 639, "negative": -5, "beyond": 1 << 20}[what]
    given = cache._replace(lengths=lengths, table=table)
    plan, out = plan_of(q, given, 640, cascade), torch.zeros_like(q)
    o, lse = tkq.cascade_attention(q, given.k, given.v, block_table=table, plan=plan, return_lse=True, out=out)
    with pytest.raises(ValueError, match=words):
        check_plans(plan)
    assert o is out and o[wrong].isnan().all() and lse[wrong].isnan().all()
    judge_each(o, lse, q, cache, what, [b for b in range(3) if b not in wrong])


@poisoned()
def test_a_table_of_the_prefix_alone():
    """No sequence has a key of its own."""
    cache, q = share(64, [64, 64, 64], 16, 2, 128), queries(3, 1, 8, 128)
    cache = cache._replace(table=cache.table[:, :4].contiguous())
    compare(q, cache, 64, "a table of the prefix alone")


@poisoned()
def test_pages_that_are_skipped():
    """Keys of a page -1, of the prefix and behind it, are as if they were not there."""
    cache, q = share(640, [1600, 700, 900], 16, 2, 128), queries(3, 1, 8, 128)
    table = cache.table.clone()
    table[:, 3:5], table[1, 41:43] = -1, -1
    given = cache._replace(table=table)
    o, lse = attend(q, given, plan_of(q, given, 640))
    truth, true_lse = reference.flash_attn_with_kvcache(q.double(), cache.k.double(), cache.v.double(), cache.lengths,
                                                        table)
    torch.testing.assert_close(o.double(), truth, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse, true_lse, rtol=1e-4, atol=1e-4)
