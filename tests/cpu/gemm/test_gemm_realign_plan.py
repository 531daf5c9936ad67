"""What is copied around a product: pure Python, and the geometry of the copies."""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.core.pitches import CASES, HEAD, PLAIN, SMALL, TURNED, Lies
from tkq.gemm.dense import launch, realigned
from tkq.gemm.dense.realign_plan import Problem, copied_ns, elements_ns, plan

BF16, NAN = torch.bfloat16, math.nan
SIZES = st.integers(1, 1 << 16)
PROBLEMS = st.builds(Problem, SIZES, SIZES, SIZES, st.integers(1, 64), st.booleans(), st.booleans())


@given(PROBLEMS)
def test_all_that_tma_does_not_take_is_copied_or_nothing(p):
    found = plan(p)
    if found is None:
        assert (p.a and p.b) or elements_ns(p) <= copied_ns(p)
    else:
        assert found == (not p.a, not p.b) and any(found)


@given(PROBLEMS)
def test_a_longer_product_is_copied_where_a_shorter_one_is(p):
    if plan(p) is not None:
        assert plan(p._replace(k=p.k + 64)) is not None


def test_finding_12_and_its_like_are_copied():
    for p in (HEAD, *(c for c in CASES if c.a not in (PLAIN, TURNED) or c.b not in (PLAIN, TURNED))):
        fits = [x.first % 8 == 0 and (rows + x.more) % 8 == 0 for x, rows in (
            (p.a, p.m if p.a.turned else p.k), (p.b, p.k if p.b.turned else p.n))]
        found = plan(Problem(p.m, p.n, p.k, max(1, p.batches), *fits))
        assert found and (found.a, found.b) == tuple(not f for f in fits), p.name


@pytest.mark.parametrize("lies", (Lies(1), Lies(8, 1), Lies(3, 5, True), Lies(0, 0), Lies(5, 0, True)))
@pytest.mark.parametrize("rows, cols, batches", ((24, 40, 0), (17, 31, 0), (17, 31, 3), (1, 9, 0), (9, 1, 2)))
def test_a_copy_is_as_tma_takes_it(lies, rows, cols, batches):
    x = lies.make(rows, cols, batches, device="cpu")
    x.copy_(torch.arange(x.numel()).view(x.shape).remainder(61))
    copied = realigned.Copied.of(x, not lies.turned)
    memory = copied.memory(x)
    taken = copied.taken(memory)
    assert taken.shape == x.shape and taken.data_ptr() % 16 == 0
    assert taken.stride(-2 if lies.turned else -1) == 1 or (rows if lies.turned else cols) == 1
    assert all(s % 8 == 0 for i, s in enumerate(taken.stride()) if i != (taken.dim() - (2 if lies.turned else 1)))
    assert memory.numel() == max(1, batches) * (cols if lies.turned else rows) * memory.stride(1)
    lines = realigned.alloc.over(x, copied.src_shape, copied.src_stride)
    assert torch.equal(lines.mT if lies.turned else lines, x if batches else x[None])
    memory.fill_(NAN)[..., :lines.shape[-1]] = lines
    assert torch.equal(taken, x), "the memory as the product takes it"


def kind(a, b, out, loose=False):
    x, y, kind = launch.kind_of(a, b, out, False, False, launch.PLAIN, loose)
    return realigned.fits(x, y, out, kind[2][:2], False, loose), kind


def test_each_operand_is_judged_by_itself():
    even, odd, result = Lies(8), Lies(8, 1), torch.empty(64, 64, dtype=BF16)
    for a, b in ((even, odd), (odd, even), (odd, odd), (even, even)):
        found, (*_, ways, _, _, _) = kind(a.make(64, 64, device="cpu"), b.make(64, 64, device="cpu"), result)
        assert found == (a is even, b is even, True) and ways[2] == (a is b is even)
    found, (*_, ways, _, _, _) = kind(even.make(64, 64, device="cpu"), even.make(64, 63, device="cpu"),
                                      torch.empty(64, 63, dtype=BF16))
    assert found == (True, False, False)


def test_a_batch_whose_results_lie_anywhere_still_comes_in_by_tma():
    a, b = (PLAIN.make(64, 64, 3, device="cpu") for _ in range(2))
    found, (*_, ways, _, _, _) = kind(a, b, Lies(1).make(64, 64, 3, device="cpu"))
    assert found == (True, True, False) and ways[2] and not ways[3]


def test_rows_of_an_odd_k_are_copied_with_zeros_behind_them():
    """Also where TMA would take them: it reads whole units, and anything lies behind the last number of a row."""
    a, b, out = PLAIN.make(64, 63, device="cpu"), PLAIN.make(63, 64, device="cpu"), torch.empty(64, 64, dtype=BF16)
    assert kind(Lies(1).make(64, 63, device="cpu"), b, out, loose=True)[0] == (False, True, True)
    assert kind(Lies(1).make(64, 63, device="cpu"), b, out)[0] == (True, True, True)
    assert kind(a.t().contiguous().t(), b, out, loose=True)[0] == (True, True, True), "not contiguous along K"


def test_products_of_one_step_are_read_element_by_element():
    assert plan(Problem(64, 64, 64, a=False)) is None and plan(Problem(128, 128, 64, a=False, b=False)) is None
    for p in SMALL:  # all of them took longer so
        if p.out == PLAIN:
            assert plan(Problem(p.m, p.n, p.k, 1, p.a == PLAIN, p.b == PLAIN)), p.name


def test_what_was_measured_is_near_what_the_plan_counts_with():
    """Microseconds, an H100: element by element, and copied (bench/results/h100/tuning/tune_gemm_pitches_ways.json)."""
    for size, elements, copied in (((128, 128, 128), 12.3, 6.0), ((16, 1024, 1024), 105, 7.0), ((1024,) * 3, 121, 11.7),
                                   ((4096,) * 3, 2108, 193), ((2048, 1024, 50256), 5784, 474)):
        p = Problem(*size, a=False)
        assert 0.6 < elements_ns(p) / elements / 1e3 < 1.6 and 0.6 < copied_ns(p) / copied / 1e3 < 1.6, p


def test_a_result_that_tma_does_not_write_goes_out_by_rows():
    a, b = (PLAIN.make(64, 64, device="cpu") for _ in range(2))
    for lies, store in ((PLAIN, "tma"), (Lies(1), "rows"), (Lies(8, 1), "rows")):
        _, found = kind(a, b, lies.make(64, 64, device="cpu"))
        assert launch.spec_of(*found[:-1])[0].store == store
    *_, found = launch.kind_of(a, b, Lies(1).make(64, 64, device="cpu"), True, False, launch.PLAIN)
    assert launch.spec_of(*found[:-1])[0].store == "direct", "which adds to what is there"


def test_operands_whose_rows_of_k_end_anywhere_do_not_come_by_tma():
    """What follows a row of K would be multiplied, too. Where K is not contiguous nothing follows."""
    out, rows, columns = torch.empty(16, 16), torch.empty(16, 8).half()[:, :3], torch.empty(3, 16).half()
    for a_is_k, b_is_k in ((True, True), (True, False), (False, True), (False, False)):
        a, b = rows if a_is_k else columns.t(), rows.t() if b_is_k else columns
        assert realigned.fits(a, b, out, (a_is_k, b_is_k), False, False) == (True, True, True)
        assert realigned.fits(a, b, out, (a_is_k, b_is_k), False, True) == (not a_is_k, not b_is_k, True)
