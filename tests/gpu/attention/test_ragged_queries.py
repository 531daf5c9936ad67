"""flash_attn_with_kvcache of sequences with different numbers of queries (chunked prefill) against float64."""
import math

import pytest
import torch

import tkq
from tests.helpers.attention.float8_cache import float8
from tests.helpers.attention.kv_cache import ask, judge_each, make, queries, starts
from tests.helpers.sanitizer.nan_fill import poisoned
from tkq.attention.decode.planned import Planned
from tkq.reference import decode as reference

LENGTHS = [0, 1, 500, 129, 1000, 4000, 17, 300, 64, 900]  # keys of each sequence
MANY = [0, 1, 3, 129, 70, 1, 30, 64, 0, 900]  # and its queries: all of them, one, more than there are keys


@pytest.mark.parametrize("page, heads, layout, window", [
    (16, (8, 2), "pages", None), (64, (6, 2), "pairs", None), (1, (2, 2), "heads", None), (16, (70, 1), "pages", None),
    (64, (8, 2), "pages", 100)])
def test_ragged_queries(page, heads, layout, window):
    """Groups of 4, 3, 1 and 70 query heads; rows of q before the first sequence and behind the last."""
    with poisoned():
        cache, cu = make(LENGTHS, page, heads[1], 128, layout=layout), starts(MANY, 3)
        q = queries(1, sum(MANY) + 8, heads[0], 128)[0]
        q[:3], q[-5:] = math.nan, math.nan
        o, lse, plan = ask(q, cache, cu, window_size=(window, None))
    tkq.check_plan(plan)
    assert o[:3].isnan().all() and o[-5:].isnan().all()
    judge_each(o, lse, q, cache, cu, left=-1 if window is None else window)
    again, of, _ = ask(q, cache, cu, plan, window_size=(window, None))
    assert torch.equal(again[3:-5], o[3:-5]) and torch.equal(of[:, 3:-5], lse[:, 3:-5])


@pytest.mark.parametrize("lengths, many", [([3000, 2000], [3000, 1]), ([20000], [2000]), ([700] * 70, [1] * 69 + [65])])
def test_whole_prefills_and_long_chunks(lengths, many):
    """A whole prefill beside one token; a chunk over long keys; many short ones."""
    with poisoned():
        cache, cu = make(lengths, 16, 2, 128), starts(many)
        q = queries(1, sum(many), 8, 128)[0]
        judge_each(*ask(q, cache, cu)[:2], q, cache, cu)


def test_ragged_queries_of_float8():
    with poisoned():
        cache, descales = float8(make(LENGTHS, 16, 2, 128), "sequence")
        cu, q = starts(MANY), queries(1, sum(MANY), 8, 128)[0]
        judge_each(*ask(q, cache, cu, **descales)[:2], q, cache, cu)


@pytest.mark.parametrize("kind", ["float8", "pages of 12"])
def test_many_ragged_queries_of_the_decode_kernel(kind):
    """Where tiles of the plan are those of chunked prefill, and the cache is none of its."""
    with poisoned():
        cache, descales = make(LENGTHS, 12 if kind != "float8" else 16, 4, 128), {}
        if kind == "float8":
            cache, descales = float8(cache, "sequence")
        cu, q = starts(MANY), queries(1, sum(MANY), 16, 128)[0]
        judge_each(*ask(q, cache, cu, **descales)[:2], q, cache, cu)


def test_few_queries_beside_many_of_float8():
    """Tiles of 128 queries, of which most sequences have one, in two and in five tiles of rows."""
    lengths, many = [1600, 129, 1000, 300], [1500, 1, 1, 70]
    for heads in ((8, 2), (10, 2)):
        with poisoned():
            cache, descales = float8(make(lengths, 16, 2, 128), "head")
            cu, q = starts(many), queries(1, sum(many), heads[0], 128)[0]
            judge_each(*ask(q, cache, cu, **descales)[:2], q, cache, cu)


def test_ragged_queries_do_not_depend_on_the_batch():
    with poisoned():
        cache, cu = make(LENGTHS, 16, 2, 128), starts(MANY)
        q = queries(1, sum(MANY), 8, 128)[0]
        o, lse, _ = ask(q, cache, cu, batch_invariant=True)
        judge_each(o, lse, q, cache, cu)
        for b in (4, 5, 9):
            own = slice(*cu[b:b + 2].tolist())
            one = cache._replace(table=cache.table[b:b + 1], lengths=cache.lengths[b:b + 1])
            found, of, _ = ask(q[own], one, starts(MANY[b:b + 1]), batch_invariant=True)
            assert torch.equal(found, o[own]) and torch.equal(of, lse[:, own])


@pytest.mark.parametrize("what, words, fine", [
    ("falls", "a length is negative", [3]), ("beyond", "a length is negative", [0, 1, 2]),
    ("moved", "not the one planned", [2, 3]), ("length", "beyond the cache", [0, 2, 3])])
def test_starts_that_lie(what, words, fine):
    """A sequence whose queries are not rows of q has none; one that is not as planned has NaN; others are as before."""
    lengths, many = [100, 2000, 40, 500], [10, 200, 40, 9]
    cache, cu = make(lengths, 16, 2, 128), starts(many)
    q = queries(1, sum(many), 8, 128)[0]
    asked = cu.clone()
    if what == "falls":
        asked[2] = 5
    elif what == "beyond":
        asked[4] += 1
    elif what == "moved":
        asked[1] += 1
    else:
        cache.lengths[1] = 1 << 20
    plan = tkq.plan_decode(cache.lengths, 8, 2, 128, cu_seqlens_q=cu if what == "moved" else asked, total_q=len(q))
    o, lse, _ = ask(q, cache, asked, plan)
    with pytest.raises(ValueError, match=words):
        tkq.check_plan(plan)
    judge_each(o, lse, q, cache, cu, fine)
    wrong = {"beyond": o[250:], "moved": o[:10], "length": o[10:210]}.get(what)
    assert wrong is None or wrong.isnan().all()


def test_rows_without_a_tile_are_nan_in_each_call():
    """Rows of q before the first sequence and behind the last, in calls that are repeated with one plan."""
    cache, cu = make([500, 129], 16, 2, 128), starts([40, 3], 5)
    q = queries(1, 60, 8, 128)[0]
    plan = tkq.plan_decode(cache.lengths, 8, 2, 128, cu_seqlens_q=cu, total_q=len(q))
    for _ in range(3):
        out = torch.ones_like(q)
        o, lse = tkq.flash_attn_with_kvcache(q, **cache.arguments(), plan=plan, cu_seqlens_q=cu, return_lse=True,
                                             out=out)
        assert o[:5].isnan().all() and o[48:].isnan().all() and o[5:48].isfinite().all()
        assert lse[:, :5].isnan().all() and lse[:, 48:].isnan().all() and lse[:, 5:48].isfinite().all()


def test_tiles_are_the_references():
    lengths = torch.tensor([500, 0, 70, -3, 128, 9], dtype=torch.int32)
    cu = torch.tensor([0, 70, 70, 75, 80, 100, 99], dtype=torch.int32)
    of = Planned.made((128, 128), (8, 2), (103,), True)
    made = tkq.plan_decode(lengths.cuda(), 8, 2, 128, cu_seqlens_q=cu.cuda(), total_q=103)
    parts = of.blocks * torch.cuda.get_device_properties(0).multi_processor_count
    assert torch.equal(made.cpu(), reference.plan_decode(lengths, cu, of, parts))
