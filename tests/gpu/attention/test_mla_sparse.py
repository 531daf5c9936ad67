"""mla_decode over lists of rows on the GPU against float64: NaN in every row that no list has."""
import math

import pytest
import torch

import tkq
from tests.helpers.attention import mla_sparse
from tests.helpers.attention.kv_cache import queries
from tests.helpers.attention.mla import SCALE, apart
from tests.helpers.sanitizer.nan_fill import poisoned

ENDS = [0, 1, 63, 64, 65, 127, 129, 400]


@pytest.mark.parametrize("rows, heads, page, topk, lengths", [
    (1, 16, 64, 400, "sequences"), (1, 128, 64, 130, None), (2, 128, 16, 257, "queries"), (2, 37, 1, 1, None),
    (3, 5, 5, 400, "queries")])
def test_lists(rows, heads, page, topk, lengths):
    """Rows in any order and more than once, lists of any length, with holes in the middle and at the end."""
    lists = mla_sparse.with_ends(mla_sparse.make(8, rows, topk, page, lengths), ENDS)
    with poisoned():
        mla_sparse.compare(queries(8, rows, heads, 576), lists)


@pytest.mark.parametrize("batch, rows, heads, topk", [(1, 1, 128, 2048), (1, 2, 16, 20000), (150, 1, 16, 300)])
def test_work_that_blocks_share(batch, rows, heads, topk):
    """One query, whose parts are merged; more queries than SMs."""
    with poisoned():
        mla_sparse.compare(queries(batch, rows, heads, 576), mla_sparse.make(batch, rows, topk, 64, None))


def test_half_precision_and_views():
    """Of q, of the cache, with gaps between rows and other ones between pages, and of the lists."""
    q = queries(8, 2, 80, 576, torch.float16)[:, :, 3:40]
    lists = mla_sparse.with_ends(mla_sparse.make(8, 2, 100, 24, "queries", torch.float16), ENDS)
    indices = torch.cat((lists.indices, lists.indices + 1), -1)[..., :100]
    mla_sparse.compare(q, lists._replace(cache=apart(lists.cache), indices=indices))


@pytest.mark.slow  # that of dense caches runs every day
def test_fixed_splits_do_not_depend_on_the_batch():
    q, lists = queries(4, 2, 70, 576), mla_sparse.make(4, 2, 2500, 64, "sequences")
    with poisoned():
        o, lse = mla_sparse.compare(q, lists, batch_invariant=True)
        for b in (0, 3):
            one = lists._replace(indices=lists.indices[b:b + 1], lengths=lists.lengths[b:b + 1])
            found = mla_sparse.call(q[b:b + 1], one, batch_invariant=True)
            assert torch.equal(found[0], o[b:b + 1]) and torch.equal(found[1], lse[b:b + 1])


def test_dense_pages_are_lists_of_all_rows():
    """By one tile of queries, whose sums both rescale alike. Also without a plan, into memory of torch's own, and as a
    graph whose lists and plan are made anew."""
    q, cache = queries(2, 1, 64, 576), torch.randn(8, 64, 576, device="cuda").bfloat16()
    table = torch.tensor([[3, 1, 0, 7], [2, 6, 5, 4]], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([256, 130], device="cuda", dtype=torch.int32)
    rows = (table[:, :, None] * 64 + torch.arange(64, device="cuda", dtype=torch.int32)).view(2, 1, 256)
    dense = tkq.mla_decode(q, cache, table, lengths, softmax_scale=0.1, return_lse=True)
    options = dict(softmax_scale=0.1, indices=rows, topk_length=lengths, return_lse=True)
    for a, b in zip(tkq.mla_decode(q, cache, **options), dense, strict=True):
        assert torch.equal(a, b)
    plan = tkq.plan_decode(lengths, 64, 1, 576, head_dim_v=512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tkq.plan_decode(lengths, 64, 1, 576, head_dim_v=512, out=plan)
        found = tkq.mla_decode(q, cache[:, :, None], plan=plan, **options)
    lengths -= 60
    rows += 64 * (rows < 64)
    graph.replay()
    for a, b in zip(found, tkq.mla_decode(q, cache, **options), strict=True):
        assert torch.equal(a, b)
    tkq.check_plan(plan)


@pytest.mark.parametrize("what, words", [
    ("negative", "a length is negative"), ("long", "beyond the cache or the indices"), ("row", "neither -1 nor one"),
    ("below", "neither -1 nor one"), ("stale", "not the one planned"), ("other", "another call")])
@pytest.mark.parametrize("fixed", [False, True])
def test_what_lies_gives_nan(what, words, fixed):
    """And nothing else does, of the same sequence either; a plan of another call gives it all over."""
    q, lists = queries(2, 2, 80, 576), mla_sparse.make(2, 2, 3000, 64, "queries")
    indices, lengths = lists.indices.clone(), torch.tensor([[3000, 2000], [70, 0]], device="cuda", dtype=torch.int32)
    whole, _ = mla_sparse.call(q, lists._replace(lengths=lengths), batch_invariant=fixed)
    planned, heads = lengths.clone(), 80
    if what in ("negative", "long"):
        lengths[0, 1] = planned[0, 1] = -3 if what == "negative" else 3001
    elif what in ("row", "below"):
        indices[0, 1, 1999] = lists.cache.shape[0] * 64 if what == "row" else -2
        indices[0, 1, 2000:], indices[1, 1] = 1 << 30, -(1 << 31)  # behind the lists' ends
    elif what == "stale":
        lengths[0, 1] += 1
    else:
        heads = 8
    plan = tkq.plan_decode(planned.flatten(), heads, 1, 576, head_dim_v=512, batch_invariant=fixed)
    o, lse = tkq.mla_decode(q, lists.cache, softmax_scale=SCALE, indices=indices, topk_length=lengths, plan=plan,
                            return_lse=True, batch_invariant=fixed)
    with pytest.raises(ValueError, match=words):
        tkq.check_plan(plan)
    assert o[0, 1].isnan().all() and lse[0, :, 1].isnan().all()
    if what == "other":
        assert o.isnan().all() and lse.isnan().all()
    else:
        others = torch.tensor([True, False, True, True], device="cuda")
        torch.testing.assert_close(o.flatten(0, 1)[others], whole.flatten(0, 1)[others], rtol=0.02, atol=0.02)


def test_no_indices_at_all():
    """Lists of no room, and a cache of no pages, whose rows are all skipped."""
    q, cache = queries(2, 1, 16, 576), torch.randn(3, 64, 576, device="cuda").bfloat16()
    for rows, of in ((torch.empty(2, 1, 0), cache), (torch.full((2, 1, 70), -1), cache[:0])):
        with poisoned():
            o, lse = tkq.mla_decode(q, of, softmax_scale=0.1, indices=rows.int().cuda(), return_lse=True)
        assert not o.any() and (lse == -math.inf).all()
