"""What is wrong has no time: a baseline whose result is far off counts as failed."""
from bench.core import harness
from bench.core.results import Bound
from tests.cpu.bench.test_bench_harness import FakeGpu, named, small_inputs
from tkq.testing.timing import Effort


def test_a_baseline_with_another_result_does_not_count():
    errors = {"tkq": 0.5, "peer": 0.01, "wrong": 0.3, "nan": float("nan"), "copy": None}
    c = harness.compare(harness.Question("gemm", "gemm", "8^3", "TFLOP/s", 1e9, Bound(("peer", "wrong"), 1.0)),
                        named(*errors), small_inputs, Effort(rounds=7), error=lambda name, *_: errors[name],
                        gpu=FakeGpu(lambda *_: 1.0))
    assert {t.name for t in c.comparison.timings if t.ok} == {"tkq", "peer", "copy"}
    assert c.comparison["wrong"].mode == "failed" and "wrong: error 0.3" in c.comparison["wrong"].note

