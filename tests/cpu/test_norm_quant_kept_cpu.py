"""KeptLayerNormQuantised's plans: who has one, and that it fits. Machine code: tests/cpu/test_kernels_sass.py; what it
computes: tests/gpu/test_norm_quant_kept.py."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tkq.norms import launch, quant_kept_plan
from tkq.norms.quant_kept_config import shape
from tkq.norms.spec import GROUP, NormSpec
from tkq.rows import plan as rows

SCALES = st.sampled_from(["row", "block"])


def spec(N, weight="fp32", bias="fp32", x="bf16", scale="row", kind="layernorm", **options):
    return NormSpec(kind, N, x, weight, bias, **{"vector": 8, "out": "e4m3", "scale": scale, **options})


def check(s, p):
    rows.check(shape(s), p)
    assert p.vectors == "float" and p.threads_per_row * p.per_thread >= p.cols and p.stages >= 3
    firsts = range(0, s.N, p.cols)
    assert len(firsts) == p.cluster, "each block of a cluster has columns, and all of them have every column"
    if s.scale == "block":
        assert not any(first % GROUP for first in firsts) and p.threads_per_row * p.vector % GROUP == 0


@settings(max_examples=60)
@given(st.integers(8192, 32768), st.sampled_from([("fp32", "fp32"), ("bf16", "bf16"), ("fp32", None)]), SCALES)
def test_every_long_row_with_more_of_weight_and_bias_than_of_x(vectors, given, scale):
    s = spec(8 * vectors, *given, scale=scale)
    check(s, quant_kept_plan.planned(s))


@settings(max_examples=20)
@given(st.integers(8192, 32768), SCALES, st.integers(1, 70), st.integers(1, 33))
def test_variants_cover_each_row_once(vectors, scale, M, units):
    s = spec(8 * vectors, scale=scale)
    found = quant_kept_plan.variants(s)
    assert len(found) >= 2 and quant_kept_plan.planned(s) in (None, *found)
    for p in found:
        check(s, p)
        assert sorted(row for u in range(units) for row in p.rows_of(u, units, M)) == list(range(M))


@pytest.mark.parametrize("other", [
    spec(32768), spec(262144, kind="rmsnorm"), spec(262144, offset=True), spec(262144, residual="bf16"),
    spec(262144, stats=True), spec(262140, vector=4), spec(262144, x="fp32", vector=4),
    spec(262144, out=None, scale=None)], ids=str)
def test_others_have_none(other):
    assert not quant_kept_plan.variants(other) and quant_kept_plan.planned(other) is None


def test_light_vectors_run_as_they_did():
    for N, weight, bias in ((262144, "bf16", None), (131072, None, "bf16"), (262144, None, None)):
        s = spec(N, weight, bias)
        assert quant_kept_plan.planned(s) is None and quant_kept_plan.variants(s)


@pytest.mark.parametrize("scale", ["row", "block"])
def test_calls_take_it(monkeypatch, scale):
    """With the number of clusters that run at once as the last argument."""
    monkeypatch.setattr(launch.runtime, "function", lambda recipe: recipe)
    monkeypatch.setattr(launch.clusters, "resident", lambda device, cluster, threads: 1000 * cluster + threads)
    run, units = launch.compiled(spec(262144, scale=scale), None)
    assert run.builder == "tkq.norms.quant_kept:build" and units == 16000 + 8 * 32 + 128
    assert launch.compiled(spec(262144, "bf16", None, scale=scale), None).builder == "tkq.norms.quant_long:build"
