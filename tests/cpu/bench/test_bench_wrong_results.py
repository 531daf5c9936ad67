"""What is wrong has no time: a baseline whose result is far off counts as failed. What is less accurate does not meet
its bound."""
import math

import pytest

from bench.core import harness
from bench.core.results import Bound, Case
from tests.cpu.bench.test_bench_harness import FakeGpu, named, small_inputs, timed
from tkq.testing.timing import Comparison, Effort


def compared(errors, *bounds):
    question = harness.Question("gemm", "gemm", "8^3", "TFLOP/s", 1e9, bounds[0], instead=bounds[-1])
    return harness.compare(question, named(*errors), small_inputs, Effort(rounds=7),
                           error=lambda name, *_: errors[name], gpu=FakeGpu(lambda *_: 1.0))


def test_a_baseline_with_another_result_does_not_count():
    errors = {"tkq": 0.1, "peer": 0.01, "wrong": 0.3, "nan": float("nan"), "copy": None}
    c = compared(errors, Bound(("peer", "wrong"), 1.0))
    assert {t.name for t in c.comparison.timings if t.ok} == {"tkq", "peer", "copy"}
    assert c.comparison["wrong"].mode == "failed" and "wrong: error 0.3" in c.comparison["wrong"].note


def test_another_result_of_ours_has_no_time_either():
    c = compared({"tkq": 0.3, "peer": 0.01}, Bound(("peer",), 1.0))
    assert not c.comparison["tkq"].ok and "wrong: error 0.3" in c.comparison["tkq"].note
    assert c.holds() is False and c.accurate() is False and not c.ratios()


def test_a_bound_beside_a_peer_that_was_not_timed():
    first, instead = Bound(("peer",), 1.5), Bound(("torch",), 3.0)
    for wrong, in_force in ((0.01, first), (0.3, instead)):
        assert compared({"tkq": 0.01, "peer": wrong, "torch": 0.01}, first, instead).bound == in_force
    assert compared({"tkq": 0.01, "torch": 0.01}, first, instead).bound == instead
    assert compared({"tkq": 0.01, "torch": 0.01}, first, None).bound == first


@pytest.mark.parametrize(("ours", "accurate"), [(2.38e-3, True), (2.66e-3, True), (2.90e-3, False), (3.4e-3, False),
                                                (math.nan, False)])
def test_equal_accuracy_is_judged_beside_the_fastest_peer(ours, accurate):
    """Attention's gradients: 2.90e-3 is dS of P in bf16, 3.4e-3 of dP - delta in bf16 too; a slow peer with a large
    error excuses neither."""
    timings = (timed("tkq", [1] * 7, error=ours), timed("FA4", [1.1] * 7, error=2.38e-3),
               timed("slow", [3] * 7, error=9e-3))
    case = Case("s", "op", "M", "GB/s", 1, Comparison(timings, 2, 1, 1), bound=Bound(("FA4",), 1.0), equal_error=1.05)
    assert case.accurate() is accurate
    lines = "\n".join(harness.case_lines(case))
    assert ("1.05 times the fastest baseline's" in lines) is not accurate
    assert math.isnan(ours) or f"({ours / 2.38e-3:.2f}x)" in lines
