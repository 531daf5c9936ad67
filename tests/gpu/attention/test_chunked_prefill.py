"""Chunked prefill, many queries of each sequence over a cache, against float64: pages of any order, NaN wherever no key
is, and which of the kernels has the calls."""
import math

import pytest
import torch

import tkq
from tests.helpers.attention.inputs import judge
from tests.helpers.attention.kv_cache import ask, call, compare, judge_each, make, queries, starts
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.attention.decode import launch
from tkq.reference import decode as reference
from tkq.runtime.call import replay

LENGTHS = [600, 1000, 4097, 0, 1, 333]  # keys of each sequence, of 400 queries: some have fewer
ROWS = 400


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Counts launches of the kernel that the tests are about, but for replayed ones: each test has some."""
    replay.clear()
    found, of = [], launch.chunked.kernel_of
    monkeypatch.setattr(launch.chunked, "kernel_of", lambda *given: found.append(1) or of(*given))
    yield found
    assert found, "another kernel had all calls"


@pytest.mark.parametrize("page, layout", [(8, "pages"), (16, "pages"), (24, "heads"), (192, "pairs"), (96, "apart"),
                                          (256, "pages"), (4104, "rows")])
def test_pages(page, layout):
    """Of one box, of several: of 8 rows each, and of more, with all columns and with 64 of them."""
    with poisoned():
        compare(queries(len(LENGTHS), ROWS, 8, 128), make(LENGTHS, page, 2, 128, layout=layout), f"pages of {page}")


@pytest.mark.parametrize("page, heads, layout, window", [
    (16, (8, 2), "pages", None), (64, (6, 2), "pairs", 200), (4104, (8, 2), "rows", None), *(
        pytest.param(*each, marks=pytest.mark.slow) for each in (
            (256, (14, 1), "heads", None), (8, (8, 8), "pages", None), (24, (8, 1), "pages", None),
            (16, (8, 2), "pages", 1000)))])
def test_ragged_queries(page, heads, layout, window):
    """From none to 3000, more than there are keys; rows of q before the first sequence and behind the last."""
    lengths, many = [3000, 900, 129, 4099, 5, 600, 0], [3000, 1, 70, 513, 0, 700, 3]
    with poisoned():
        cache, cu = make(lengths, page, heads[1], 128, layout=layout), starts(many, 3)
        q = queries(1, sum(many) + 8, heads[0], 128)[0]
        q[:3], q[-5:] = math.nan, math.nan
        o, lse, plan = ask(q, cache, cu, window_size=(window, None))
    tkq.check_plan(plan)
    assert o[:3].isnan().all() and o[-5:].isnan().all()
    judge_each(o, lse, q, cache, cu, left=-1 if window is None else window)
    for _ in range(5):
        again, of, _ = ask(q, cache, cu, plan, window_size=(window, None))
        assert torch.equal(again[3:-5], o[3:-5]) and torch.equal(of[:, 3:-5], lse[:, 3:-5])


def test_ragged_queries_without_a_plan():
    lengths, many = [3000, 20, 900], [1500, 20, 700]
    with poisoned():
        cache, cu = make(lengths, 16, 2, 128), starts(many)
        q = queries(1, sum(many), 8, 128)[0]
        o, lse, _ = ask(q, cache, cu)
        again, of = tkq.flash_attn_with_kvcache(q, **cache.arguments(), cu_seqlens_q=cu, return_lse=True)
    assert torch.equal(again, o) and torch.equal(of, lse)


@pytest.mark.parametrize("dims, heads, dtype, page", [
    ((64, 64), (8, 8), torch.float16, 16), pytest.param((64, 64), (16, 2), torch.bfloat16, 8, marks=pytest.mark.slow),
    ((192, 128), (8, 2), torch.bfloat16, 16),
    pytest.param((192, 192), (8, 2), torch.bfloat16, 8, marks=pytest.mark.slow),
    pytest.param((192, 192), (8, 2), torch.float16, 64, marks=pytest.mark.slow),
    ((256, 256), (8, 2), torch.bfloat16, 16),
    pytest.param((256, 256), (8, 8), torch.float16, 24, marks=pytest.mark.slow),
    pytest.param((256, 256), (8, 4), torch.bfloat16, 4104, marks=pytest.mark.slow)])
def test_head_dims(dims, heads, dtype, page):
    layout = "rows" if page > 4000 else "pages"
    with poisoned():
        compare(queries(len(LENGTHS), ROWS, heads[0], dims[0], dtype),
                make(LENGTHS, page, heads[1], *dims, dtype, layout), f"{dims}")


@pytest.mark.parametrize("window", [
    (None, None), (700, None), (200, 30), *(
        pytest.param(window, marks=pytest.mark.slow) for window in ((0, 0), (100, None), (None, 10), (900, 0)))])
@pytest.mark.parametrize("more", (False, True))
@pytest.mark.sampled(when=lambda window, more: more == (window in ((None, None), (700, None))))
def test_windows_softcap_and_sinks(window, more):
    options = dict(softcap=20.0, sinks=torch.linspace(-2, 2, 8, device="cuda")) if more else {}
    with poisoned():
        cache, q = make(LENGTHS, 16, 2, 128), queries(len(LENGTHS), ROWS, 8, 128)
        compare(q, cache, f"{window}", window_size=window, causal=window[1] is None, **options)


def test_every_key_for_every_query():
    with poisoned():
        compare(queries(len(LENGTHS), ROWS, 8, 128), make(LENGTHS, 64, 2, 128), "not causal", causal=False)


@pytest.mark.parametrize("scale", [1e-4, 40.0])
@poisoned()
def test_scales(scale):
    """Rows of equal weights, and rows of one key."""
    compare(queries(2, 1500, 8, 128) * scale, make([1700, 5000], 16, 2, 128), f"scale {scale}")


@poisoned()
def test_the_benchmarks_shape():
    cache, q = make([18432], 16, 2, 128), queries(1, 2048, 8, 128)
    o, lse = call(q, cache)
    k, v = cache.keys[0]
    for first in (0, 1000, 1920):  # the rows of a block, whose keys end with their own
        rows, end = slice(first, first + 128), 18432 - 2048 + first + 128
        judge(o[:, rows], lse[..., rows], q[:, rows], k[None, :end], v[None, :end], f"rows from {first}", causal=True)


@pytest.mark.parametrize("page", [16, 64, 256])
@poisoned()
def test_pages_that_are_skipped(page):
    """Keys of a page -1 are as if they were not there: single ones, whole blocks, all that the first queries see, all
    of a sequence."""
    lengths = [1500, 2000, 700, 520]
    cache, q = make(lengths, page, 2, 128), queries(len(lengths), 500, 8, 128)
    table, each = cache.table.clone(), [-(-n // page) for n in lengths]
    table[0, :each[0]:2] = -1
    table[1, :each[1] - 1] = -1
    table[2, 1:3], table[3, :each[3]] = -1, -1
    o, lse = call(q, cache._replace(table=table))
    truth, true_lse = reference.flash_attn_with_kvcache(q.double(), cache.k.double(), cache.v.double(), cache.lengths,
                                                        table)
    torch.testing.assert_close(o.double(), truth, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, true_lse, rtol=1e-4, atol=1e-4)
    assert not o[3].any() and (lse[3] == -math.inf).all()


@poisoned()
def test_a_page_beside_a_window_that_lies():
    """It is in the first tiles' blocks of keys, and in no query's window: all tiles say the same."""
    cache, q = make([700, 2000, 640], 16, 2, 128), queries(3, 600, 8, 128)
    table = cache.table.clone()
    table[1, (2000 - 600 - 200) // 16 - 1] = len(cache.k)
    o, _ = tkq.flash_attn_with_kvcache(q, **cache._replace(table=table).arguments(), window_size=(200, None),
                                       return_lse=True)
    assert o[1].isnan().all() or o[1].isfinite().all()
    assert o[[0, 2]].isfinite().all()


@pytest.mark.parametrize("window", [(100, None), pytest.param((700, None), marks=pytest.mark.slow)])
def test_windows_without_an_end(window):
    with poisoned():
        compare(queries(len(LENGTHS), ROWS, 8, 128), make(LENGTHS, 16, 2, 128), f"{window}", window_size=window,
                causal=False)


def test_calls_without_lse_into_rows_that_lie_apart():
    """As models call it: o alone; and into heads that come first in memory."""
    cache, q = make([2500], 16, 2, 128), queries(1, 2000, 8, 128)
    with poisoned():
        o, _ = call(q, cache)
        out = torch.full((1, 8, 2000, 128), math.nan, device="cuda", dtype=q.dtype).transpose(1, 2)
        alone = tkq.flash_attn_with_kvcache(q, **cache.arguments())
        tkq.flash_attn_with_kvcache(q, **cache.arguments(), out=out)
    assert torch.equal(alone, o) and torch.equal(out, o)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_sinks_of_ragged_queries(dtype):
    lengths, many = [1000, 1200], [900, 900]
    sinks = torch.linspace(-2, 2, 8, device="cuda").to(dtype)
    with poisoned():
        cache, cu = make(lengths, 16, 2, 128), starts(many)
        q = queries(1, sum(many), 8, 128)[0]
        o, lse, _ = ask(q, cache, cu, softcap=20.0, sinks=sinks)
        for b, (first, end) in enumerate(zip(cu.tolist(), cu[1:].tolist())):
            k, v = cache.keys[b]
            judge(o[None, first:end], lse[None, :, first:end], q[None, first:end], k[None], v[None], f"sequence {b}",
                  causal=True, softcap=20.0, sinks=sinks)


@pytest.mark.parametrize("what, words", [
    ("length", "a length is negative"), ("beyond", "beyond the cache"), ("page", "neither -1 nor one"),
    ("first page", "neither -1 nor one"), ("last page", "neither -1 nor one"), ("stale", "not the one planned"),
    ("other", "another call")])
@poisoned()
def test_what_lies_gives_nan(what, words):
    """And nothing else does: a page that the first queries do not see makes all of its sequence NaN, as it does where
    there are few queries."""
    cache, q = make([700, 2000, 640], 16, 2, 128), queries(3, 600, 8, 128)
    whole, _ = call(q, cache)
    lengths, table, planned, heads = cache.lengths.clone(), cache.table.clone(), cache.lengths.clone(), 2
    if what == "length":
        lengths[1] = planned[1] = -5
    elif what == "beyond":
        lengths[1] = planned[1] = 1 << 28
    elif what == "page":
        table[1, 70] = len(cache.k)
    elif what == "first page":
        table[1, 0] = -2
    elif what == "last page":
        table[1, 124] = 1 << 29
    elif what == "stale":
        lengths[1] += 1
    else:
        heads = 1
    plan = tkq.plan_decode(planned, 4 * heads, heads, 128, max_seqlen_q=600)
    if heads == 1:
        want = tkq.plan_decode(planned, 8, 2, 128, max_seqlen_q=600)
        plan = torch.cat((plan, plan.new_zeros(len(want) - len(plan))))
    o, lse = tkq.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=lengths, block_table=table, plan=plan,
                                         return_lse=True)
    with pytest.raises(ValueError, match=words):
        tkq.check_plan(plan)
    assert o[1].isnan().all() and lse[1].isnan().all()
    if what == "other":
        assert o.isnan().all() and lse.isnan().all()
    else:
        assert torch.equal(o[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize("what, words, fine", [
    ("falls", "a length is negative", [3]), ("beyond", "a length is negative", [0, 1, 2]),
    ("moved", "not the one planned", [2, 3]), ("length", "beyond the cache", [0, 2, 3]),
    ("page", "neither -1 nor one", [0, 2, 3])])
def test_ragged_queries_that_lie(what, words, fine):
    """A sequence whose queries are not rows of q has none; one that is not as planned has NaN; others are as before.
    Of ragged queries a page that is not there makes those NaN whose tile sees it."""
    lengths, many = [1000, 2000, 400, 900], [800, 1500, 400, 90]
    cache, cu = make(lengths, 16, 2, 128), starts(many)
    q = queries(1, sum(many), 8, 128)[0]
    asked = cu.clone()
    if what == "falls":  # by so little that the list of tiles, which has room for those of all rows, still has them
        asked[2] = 750
    elif what == "beyond":
        asked[4] += 1
    elif what == "moved":
        asked[1] += 1
    elif what == "page":
        cache.table[1, 60] = 1 << 20  # keys 960 to 975: seen by queries from 460 on
    else:
        cache.lengths[1] = 1 << 20
    plan = tkq.plan_decode(cache.lengths, 8, 2, 128, cu_seqlens_q=cu if what == "moved" else asked, total_q=len(q))
    o, lse, _ = ask(q, cache, asked, plan)
    with pytest.raises(ValueError, match=words):
        tkq.check_plan(plan)
    judge_each(o, lse, q, cache, cu, fine)
    wrong = {"beyond": o[2700:], "moved": o[:800], "length": o[800:2300], "page": o[800 + 480:2300]}.get(what)
    assert wrong is None or wrong.isnan().all()
    assert what != "page" or not o[800:800 + 400].isnan().any()


@poisoned()
def test_the_same_bits_in_every_run(served):
    """And a row's do not depend on the sequences beside it."""
    cache, q = make([5000, 1700, 2000], 64, 2, 128), queries(3, 1600, 8, 128)
    first = call(q, cache)
    for _ in range(20):
        again = call(q, cache)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    one = cache._replace(table=cache.table[:1], lengths=cache.lengths[:1])
    before = len(served)
    alone = call(q[:1], one)
    assert len(served) > before
    assert torch.equal(alone[0], first[0][:1]) and torch.equal(alone[1], first[1][:1])


@poisoned()
def test_a_graph_whose_lengths_grow():
    cache, q = make([2900, 1400], 16, 2, 128), queries(2, 900, 8, 128)
    lengths = torch.tensor([901, 1000], device="cuda", dtype=torch.int32)
    plan = tkq.plan_decode(lengths, 8, 2, 128, max_seqlen_q=900)
    given = dict(cache.arguments(), cache_seqlens=lengths, plan=plan, return_lse=True)
    tkq.flash_attn_with_kvcache(q, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tkq.plan_decode(lengths, 8, 2, 128, max_seqlen_q=900, out=plan)
        layers = [tkq.flash_attn_with_kvcache(q, **given) for _ in range(2)]
    for _ in range(3):
        lengths += torch.tensor([600, 13], device="cuda", dtype=torch.int32)
        graph.replay()
        o, lse = tkq.flash_attn_with_kvcache(q, **dict(given, plan=None))
        for layer in layers:
            assert torch.equal(layer[0], o) and torch.equal(layer[1], lse)
        truth, _ = reference.flash_attn_with_kvcache(q.double(), cache.k.double(), cache.v.double(), lengths,
                                                     cache.table)
        torch.testing.assert_close(o.double(), truth, rtol=0.02, atol=0.02)
    tkq.check_plan(plan)


@poisoned()
def test_calls_that_are_replayed():
    """With a plan, into other tensors: what came is what was launched the first time."""
    for seed in range(4):
        cache, q = make([1500, 1200], 64, 2, 128, seed=seed), queries(2, 800, 8, 128, seed=seed + 10)
        compare(q, cache, f"call {seed}")


@pytest.mark.parametrize("strides", ["heads first", "sequences apart"])
def test_strides_of_queries(strides, served):
    """Heads may be first in memory. Sequences that do not lie one behind the other are the decode kernel's."""
    cache, q = make([1500, 1200], 16, 2, 128), queries(2, 800, 8, 128)
    with poisoned():
        want = call(q, cache)
        before = len(served)
        wide = q.new_full((2, 8, 900, 128), math.nan).transpose(1, 2)
        wide[:, :800] = q
        if strides == "heads first":
            wide = wide.new_full((8, 2 * 800, 128), math.nan).transpose(0, 1).view(2, 800, 8, 128)
            wide.copy_(q)
        o, lse = call(wide[:, :800], cache)
    torch.testing.assert_close(o, want[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse, want[1], rtol=1e-4, atol=1e-4)
    assert (len(served) > before) == (strides == "heads first")
