"""flash_attn_with_kvcache on the GPU against float64: pages of any size and order, NaN wherever no key is."""
import math

import pytest
import torch

import tkq
from tests.helpers.attention.kv_cache import ENDS, call, compare, make, queries
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.attention.decode import launch
from tkq.reference import decode as reference
from tkq.testing import assert_2x


@pytest.mark.parametrize("page, layout", [(16, "pages"), (1, "pages"), (7, "heads"), (64, "pairs"), (256, "pages")])
def test_pages(page, layout):
    with poisoned():
        cache = make(ENDS, page, 2, 128, layout=layout)
        compare(queries(len(ENDS), 1, 8, 128), cache, f"pages of {page}")


@pytest.mark.parametrize("lengths, heads", [([65536 + 3], 32), ([8192], 8), ([3000, 2999, 1], 64), ([300] * 40, 16)])
def test_work_that_blocks_share(lengths, heads):
    """One long sequence, whose parts are merged; 8 query heads to a K/V head; more tasks than SMs."""
    with poisoned():
        compare(queries(len(lengths), 1, heads, 128), make(lengths, 64, max(1, heads // 8), 128), "shared")


@pytest.mark.parametrize("rows, window", [(4, (None, None)), (3, (100, None)), (1, (200, 0)), (70, (None, None)),
                                          (5, (300, 2))])
def test_queries_that_see_other_keys(rows, window):
    """Several queries, some before the first key; windows; softcap and sinks."""
    lengths = [0, 1, 3, 130, 1000, 2500]
    sinks = torch.linspace(-2, 2, 6, device="cuda")
    with poisoned():
        compare(queries(len(lengths), rows, 6, 128), make(lengths, 16, 2, 128), f"{rows} queries", window_size=window,
                causal=window[1] is None, softcap=20.0, sinks=sinks)


@pytest.mark.parametrize("dims, dtype, layout", [
    ((64, 64), torch.float16, "rows"), pytest.param((96, 96), torch.bfloat16, "pages", marks=pytest.mark.slow),
    ((192, 128), torch.bfloat16, "pages"), ((256, 256), torch.float16, "pages")])
def test_head_dims(dims, dtype, layout):
    lengths, page = [1, 64, 1000, 0, 777, 3000], 3072 if layout == "rows" else 24
    with poisoned():
        compare(queries(len(lengths), 2, 8, dims[0], dtype), make(lengths, page, 4, *dims, dtype, layout), f"{dims}")


@pytest.mark.parametrize("scale", [1e-4, 40.0])
@poisoned()
def test_scales(scale):
    """Rows of equal weights, and rows of one key."""
    cache = make([700, 5000], 16, 2, 128)
    compare(queries(2, 1, 8, 128) * scale, cache, f"scale {scale}")


def test_fixed_splits_do_not_depend_on_the_batch():
    lengths = [5000, 1024, 1025, 3, 0, 9000]
    with poisoned():
        cache, q = make(lengths, 64, 2, 128), queries(len(lengths), 1, 8, 128)
        o, lse = compare(q, cache, "fixed", batch_invariant=True)
        for b in (0, 2, 5):
            one = cache._replace(table=cache.table[b:b + 1], lengths=cache.lengths[b:b + 1])
            found = call(q[b:b + 1], one, batch_invariant=True)
            assert torch.equal(found[0], o[b:b + 1]) and torch.equal(found[1], lse[b:b + 1])


@poisoned()
def test_the_same_bits_in_every_run():
    cache, q = make([20000, 300, 7], 16, 2, 128), queries(3, 1, 8, 128)
    first = call(q, cache)
    for _ in range(20):
        again = call(q, cache)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@poisoned()
def test_a_graph_whose_lengths_grow():
    cache, q = make([900, 40, 260], 16, 2, 128), queries(3, 1, 8, 128)
    lengths = torch.tensor([100, 1, 255], device="cuda", dtype=torch.int32)
    plan = tkq.plan_decode(lengths, 8, 2, 128)
    given = dict(cache.arguments(), cache_seqlens=lengths, plan=plan, return_lse=True)
    tkq.flash_attn_with_kvcache(q, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tkq.plan_decode(lengths, 8, 2, 128, out=plan)
        layers = [tkq.flash_attn_with_kvcache(q, **given) for _ in range(2)]
    for _ in range(3):
        lengths += torch.tensor([200, 13, 1], device="cuda", dtype=torch.int32)
        graph.replay()
        o, lse = tkq.flash_attn_with_kvcache(q, **dict(given, plan=None))
        for layer in layers:
            assert torch.equal(layer[0], o) and torch.equal(layer[1], lse)
        truth, _ = reference.flash_attn_with_kvcache(q.double(), cache.k.double(), cache.v.double(), lengths,
                                                     cache.table)
        torch.testing.assert_close(o.double(), truth, rtol=0.02, atol=0.02)
    tkq.check_plan(plan)


@poisoned()
def test_pages_that_are_skipped():
    """Keys of a page -1 are as if they were not there; those of other sequences stay."""
    cache, q = make([100, 1000, 40], 16, 2, 128), queries(3, 1, 8, 128)
    table = cache.table.clone()
    table[1, 3:5], table[2, :3] = -1, -1
    o, lse = call(q, cache._replace(table=table))
    truth, true_lse = reference.flash_attn_with_kvcache(q.double(), cache.k.double(), cache.v.double(), cache.lengths,
                                                        table)
    torch.testing.assert_close(o.double(), truth, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse, true_lse, rtol=1e-4, atol=1e-4)
    assert not o[2].any() and (lse[2] == -math.inf).all()


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_longest_length_beside_a_window(rows, fixed):
    """Whose first key is where numbers of keys end: nothing in front of the table is looked at."""
    cache, q = make([100, 2000, 40], 16, 2, 128), queries(3, rows, 8, 128)
    lengths = cache.lengths.clone()
    lengths[1] = (1 << 31) - 1
    with poisoned():
        o, want = (tkq.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=of, block_table=cache.table,
                                               window_size=(3, None), batch_invariant=fixed)
                   for of in (lengths, cache.lengths))
    assert o[1].isnan().all()
    torch.testing.assert_close(o[[0, 2]], want[[0, 2]], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("what, words", [
    ("length", "a length is negative"), ("beyond", "beyond the cache"), ("page", "neither -1 nor one"),
    ("stale", "not the one planned"), ("other", "another call")])
@pytest.mark.parametrize("fixed", [False, True])
def test_what_lies_gives_nan(what, words, fixed):
    """And nothing else does; a plan of another call gives it all over. In memory that was 0 before."""
    cache, q = make([100, 2000, 40], 16, 2, 128), queries(3, 1, 8, 128)
    whole, _ = call(q, cache, batch_invariant=fixed)
    lengths, table, planned, heads = cache.lengths.clone(), cache.table.clone(), cache.lengths.clone(), 2
    if what == "length":
        lengths[1] = planned[1] = -5
    elif what == "beyond":
        lengths[1] = planned[1] = 1 << 28
    elif what == "page":
        table[1, 70] = 4000
    elif what == "stale":
        lengths[1] += 1
    else:
        heads = 1
    plan = tkq.plan_decode(planned, 4 * heads, heads, 128, batch_invariant=fixed)
    if heads == 1:
        plan = torch.cat((plan, plan.new_zeros(3)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = tkq.flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=lengths, block_table=table, plan=plan,
                                             return_lse=True, batch_invariant=fixed)
    o.zero_(), lse.zero_()
    graph.replay()
    with pytest.raises(ValueError, match=words):
        tkq.check_plan(plan)
    assert o[1].isnan().all() and lse[1].isnan().all()
    if what == "other":
        assert o.isnan().all() and lse.isnan().all()
    else:
        torch.testing.assert_close(o[[0, 2]], whole[[0, 2]], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("queries_, left, fixed", [(1, -1, False), (4, -1, True), (3, 500, False)])
def test_plans(queries_, left, fixed):
    """The kernel's words are the reference's."""
    lengths = torch.tensor([5, 0, 70000, -3, 128, 129, (1 << 31) - 1, 2] + list(range(0, 9000, 9)), dtype=torch.int32)
    of = launch.Planned(32, 8, 128, queries_, left, fixed)
    made = launch.make_plan(lengths.cuda(), of)
    parts = torch.cuda.get_device_properties(0).multi_processor_count
    assert torch.equal(made.cpu(), reference.plan_decode(lengths, None, of, parts))


# ---- merge_state, kv_append -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 5, 8, 128), (37, 3, 72)])
def test_merged_states(shape):
    torch.manual_seed(0)
    a, b = torch.randn(2, *shape, device="cuda").bfloat16()
    *batch, rows, heads, _ = shape
    of_a, of_b = (torch.randn(*batch, rows, heads, device="cuda").mul(4).mT for _ in range(2))
    of_a[..., 0], of_b[..., 1:3], of_a[..., 1] = -math.inf, -math.inf, -math.inf
    a[..., 0, :, :] = math.nan  # of a part that saw no key
    with poisoned():
        o, lse = tkq.merge_state(a, of_a, b, of_b)
    truth, true_lse = reference.merge_state(a.double(), of_a.double(), b.double(), of_b.double())
    assert_2x(o, truth, reference.merge_state(a, of_a, b, of_b)[0])
    torch.testing.assert_close(lse, true_lse, rtol=2e-6, atol=2e-6)
    assert not o[..., 1, :, :].any() and lse.is_contiguous()


@pytest.mark.parametrize("interleaved, columns, index", [(False, 64, torch.int64), (True, 24, torch.int32)])
def test_append(interleaved, columns, index):
    torch.manual_seed(0)
    packed = torch.randn(9, 12, 64, device="cuda").bfloat16()
    q, k, v = packed[:, :8], packed[:, 8:10], packed[:, 10:]
    caches = torch.randn(5, 2, 7, 2, 64, device="cuda").bfloat16().unbind(1)  # K and V between each other
    slots = torch.tensor([34, 0, -1, 8, 35, 6, -(1 << 31), 7, (1 << 31) - 1], device="cuda").to(index)
    cos, sin = tkq.rope_cos_sin(50, columns, device="cuda")
    positions = torch.tensor([0, 49, 3, 50, 7, -1, 1, 2, 20], device="cuda").to(index)
    wide = [c.double() for c in caches]
    want = reference.kv_append(k.double(), v.double(), *wide, slots, cos.double(), sin.double(), interleaved, positions,
                               q.double())
    low = [c.clone() for c in caches]
    want_low = reference.kv_append(k, v, *low, slots, cos, sin, interleaved, positions, q)
    with poisoned():
        turned = tkq.kv_append(k, v, *caches, slots, cos=cos, sin=sin, interleaved=interleaved, positions=positions,
                               q=q)
    assert_2x(turned, want, want_low)
    for cache, truth, peer in zip(caches, wide, low):
        assert_2x(cache, truth, peer)
    assert torch.equal(caches[1], low[1])
    plain = [torch.zeros_like(c) for c in low]
    assert tkq.kv_append(k, v, *plain, slots) is None
    assert torch.equal(plain[0][4, 6], k[0]) and torch.equal(plain[1][1, 1], v[3]) and plain[0].any(-1).sum() == 10
