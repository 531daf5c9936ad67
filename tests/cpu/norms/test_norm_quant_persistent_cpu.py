"""Plans of persistent float8 norms: which specs have one; they fit. Machine code: test_kernels_sass.py. Results:
tests/gpu/norms/test_norm_quant_persistent.py."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tkq.norms import fp8_persistent_plan, launch
from tkq.norms.fp8_persistent_plan import shape
from tkq.norms.spec import GROUP, NormSpec
from tkq.rows.persistent import plan as rows

SCALES, KINDS = st.sampled_from(["row", "1x128"]), st.sampled_from(["rmsnorm", "layernorm"])


def spec(N, weight="fp32", bias="fp32", x="bf16", scale="row", kind="layernorm", **options):
    return NormSpec(kind, N, x, weight, bias, **{"vector": 8, "out": "e4m3", "scale": scale, **options})


def check(s, p):
    rows.check(shape(s), p)
    assert p.vectors == "float" and p.threads_per_row * p.per_thread >= p.cols
    assert p.stages >= len(shape(s).sums) + 2, "a row is on its way while others are worked on"
    firsts = range(0, s.N, p.cols)
    assert len(firsts) == p.cluster, "each block of a cluster has columns, and all of them have every column"
    if s.scale == "1x128":
        assert not any(first % GROUP for first in firsts) and p.threads_per_row * p.vector % GROUP == 0


@settings(max_examples=60)
@given(st.integers(1536, 32768), st.sampled_from([("fp32", "fp32"), ("bf16", "bf16"), ("fp32", None)]), SCALES, KINDS,
       st.booleans())
def test_every_long_row_with_more_of_weight_and_bias_than_of_x(vectors, given, scale, kind, offset):
    s = spec(8 * vectors, *given, scale=scale, kind=kind, offset=offset)
    check(s, fp8_persistent_plan.planned(s))


@settings(max_examples=30)
@given(st.integers(8193, 32768), st.sampled_from([("bf16", None), (None, "bf16"), (None, None)]), SCALES, KINDS)
def test_every_row_that_is_longer_still(vectors, given, scale, kind):
    s = spec(8 * vectors, *given, scale=scale, kind=kind)
    p = fp8_persistent_plan.planned(s)
    assert (p is not None) == (s.N > 131072 or scale == "1x128")
    if p:
        check(s, p)


@settings(max_examples=40)
@given(st.integers(1024, 32768), SCALES, KINDS, st.sampled_from([None, "bf16", "fp16"]))
def test_rows_with_a_residual(vectors, scale, kind, total):
    """Rows of 262144 columns have room for three at once: two exchanges would leave none to come meanwhile."""
    s = spec(8 * vectors, scale=scale, kind=kind, residual="bf16", total=total)
    p = fp8_persistent_plan.planned(s)
    assert (p is not None) == (s.N == 131072 or (s.N > 131072 and scale == "1x128"))
    if p:
        check(s, p)


@settings(max_examples=20)
@given(st.integers(8192, 32768), SCALES, KINDS, st.integers(1, 70), st.integers(1, 33))
def test_variants_cover_each_row_once(vectors, scale, kind, M, units):
    s = spec(8 * vectors, scale=scale, kind=kind)
    found = fp8_persistent_plan.variants(s)
    assert len(found) >= 2 and fp8_persistent_plan.planned(s) in found
    for p in found:
        check(s, p)
        assert sorted(row for u in range(units) for row in p.rows_of(u, units, M)) == list(range(M))


@settings(max_examples=60)
@given(st.integers(1024, 8191), SCALES, KINDS, st.sampled_from([None, "bf16"]))
def test_shorter_rows_have_variants(vectors, scale, kind, residual):
    """Which of them are planned, HEAVY_FROM_BYTES says: with another one each would have a plan."""
    s = spec(8 * vectors, scale=scale, kind=kind, residual=residual, total=residual)
    found = fp8_persistent_plan.variants(s)
    assert found and (fp8_persistent_plan.planned(s) is not None) == (s.N >= 12288 and residual is None)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("HEAVY_FROM_BYTES", "HEAVY_WITH_RESIDUAL_FROM_BYTES"):
            patched.setattr(fp8_persistent_plan, name, fp8_persistent_plan.SERVED_FROM_BYTES)
        found += [fp8_persistent_plan.planned(s)] if residual is None or s.N >= 16384 else []
    for p in found:
        check(s, p)


@pytest.mark.parametrize("other", [
    spec(8184), spec(262144, stats=True), spec(262140, vector=4), spec(262144, x="fp32", vector=4),
    spec(262144, residual="fp32", vector=4), spec(262144, total="fp32", vector=4), spec(262144, heads="rows"),
    spec(262144, out=None, scale=None), spec(262144, out="fp16", scale=None)], ids=str)
def test_others_have_none(other):
    assert not fp8_persistent_plan.variants(other) and fp8_persistent_plan.planned(other) is None


@pytest.mark.parametrize("scale", ["row", "1x128"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_calls_take_it(monkeypatch, kind, scale):
    """With the number of clusters that run at once as the last argument."""
    monkeypatch.setattr(launch.runtime, "function", lambda recipe: recipe)
    monkeypatch.setattr(launch.clusters, "resident", lambda device, cluster, threads: 1000 * cluster + threads)
    for vectors in ((), ("bf16", None)):
        run, units = launch.compiled(spec(262144, *vectors, kind=kind, scale=scale), None)
        assert run.builder == "tkq.norms.forward.fp8_persistent:PersistentFp8" and units == 16000 + 8 * 32 + 128
    run, units = launch.compiled(spec(16384, kind=kind, scale=scale), None)
    assert run.builder == "tkq.norms.forward.fp8_persistent:PersistentFp8" and units == 1000 + 16 * 32 + 128
    other = launch.compiled(spec(131072 if scale == "row" else 65536, "bf16", None, kind=kind, scale=scale), None)
    assert other.builder == "tkq.norms.forward.kernel:NormWithOptions"
