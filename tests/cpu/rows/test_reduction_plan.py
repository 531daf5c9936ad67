"""The arithmetic of reductions and the plans of the norms: pure Python, so every N can be looked at."""
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkq.dtypes import WIDTH
from tkq.norms import config as norms_config
from tkq.norms import plan as norms
from tkq.norms.spec import MAX_N, NormSpec
from tkq.reduction import geometry

DTYPES = st.sampled_from(["bf16", "fp16", "fp32"])
COLUMNS = st.one_of(
    st.integers(1, MAX_N), st.integers(1, 4096), st.integers(1, MAX_N // 8).map(lambda n: 8 * n),
    st.integers(0, 18).flatmap(lambda e: st.sampled_from([2**e, max(1, 2**e - 1), min(MAX_N, 2**e + 1)])))


def columns_covered(t, N):
    """How often the threads of all blocks hold each column, out of those below N."""
    count = [0] * N
    for rank in range(t.cluster):
        for thread in range(t.threads_per_row):
            for j in range(t.blocks):
                first = rank * t.cols + (j * t.threads_per_row + thread) * t.vector
                for c in range(first, min(first + t.vector, N)):
                    count[c] += 1
    return count


@pytest.mark.parametrize("N", [1, 2, 7, 8, 63, 64, 65, 100, 129, 1000, 1024, 3073, 4100, 6144, 16384, 16392, 40000,
                               65537])
@pytest.mark.parametrize("width", [16, 32])
@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_each_column_belongs_to_one_thread(N, width, cluster):
    t = geometry.tile(N, geometry.vector(N, width), geometry.threads_per_row(N), geometry.num_threads(N), cluster)
    assert columns_covered(t, N) == [1] * N


@given(COLUMNS, st.sampled_from([16, 32]), st.sampled_from([1, 2, 4, 8, 16]))
def test_the_ladder_gives_a_tile_for_every_N(N, width, cluster):
    vec = geometry.vector(N, width)
    t = geometry.tile(N, vec, geometry.threads_per_row(N), geometry.num_threads(N), cluster)
    assert N % vec == 0 and vec * width <= 128
    assert t.threads == geometry.num_threads(N) and t.threads % 32 == 0
    assert t.cols * t.cluster >= N
    # peers never collapse onto one tile: a second block has columns of its own
    assert t.cluster == 1 or t.cols < N
    assert t.cols * t.cluster - N < t.cluster * t.threads_per_row * vec


@pytest.mark.parametrize("bad", [
    dict(N=0), dict(N=10, vec=4), dict(row_threads=24, threads=96), dict(row_threads=64, threads=32), dict(threads=48),
    dict(threads=2048)])
def test_a_tile_that_cannot_be_is_refused(bad):
    with pytest.raises(ValueError):
        geometry.tile(**{**dict(N=64, vec=8, row_threads=32, threads=128, cluster_n=1), **bad})


@st.composite
def specs(draw):
    x, N = draw(DTYPES), draw(COLUMNS)
    optional = st.one_of(st.none(), DTYPES)
    widest = geometry.vector(N, WIDTH[x])
    vector = draw(st.sampled_from([v for v in (1, 2, 4, 8) if widest % v == 0]))
    return NormSpec(draw(st.sampled_from(["rmsnorm", "layernorm"])), N, x, draw(optional), draw(optional), vector)


@given(specs())
def test_every_spec_has_a_config_that_fits(spec):
    config = norms.plan(spec)
    norms_config.check(spec, config)
    t = config.tile(spec)
    assert t.cols * t.cluster >= spec.N
    assert t.threads == config.threads <= 1024
    assert norms_config.smem_bytes(spec, config) <= 227 * 1024
    assert t.per_thread <= 64
    light = sum(WIDTH[dtype] for dtype in (spec.weight, spec.bias) if dtype) <= spec.width
    gains = 196608 if light and spec.kind == "rmsnorm" else 131072  # bytes of a row
    assert t.cluster <= 8 or spec.N * spec.width > 8 * gains, "what is not portable is for rows that gain by it"
    if config.prefetch_weight:  # 65536 registers on an SM, 255 a thread: what is held must leave room to work
        assert norms_config.packed_words(spec, config) <= 64


def test_which_rows_leave_the_registers_to_their_weight():
    def split(N, x, weight):
        return norms.plan(NormSpec("rmsnorm", N, x, weight, vector=128 // WIDTH[x])).split

    assert split(262144, "bf16", "bf16") and split(131080, "bf16", None) and split(131072, "fp32", "fp32")
    assert split(262144, "bf16", "fp32") and not split(131072, "bf16", "bf16") and not split(32768, "fp32", "fp32")


@pytest.mark.parametrize("x, N, threads", [("bf16", 1024, 128), ("bf16", 2048, 256), ("fp32", 1024, 256),
                                           ("bf16", 768, 32), ("bf16", 2056, 128)])
def test_rows_of_two_and_four_kilobytes_have_a_vector_to_a_thread(x, N, threads):
    config = norms.plan(NormSpec("rmsnorm", N, x, x, vector=128 // WIDTH[x]))
    assert config.threads_per_row == threads and config.threads == max(threads, 128)


def test_every_N_has_a_valid_plan():
    """Without vectors every N up to 8192, beyond them every seventh and those around multiples of 1024."""
    around = {n + i for n in range(8192, MAX_N, 1024) for i in (-1, 0, 1)} | {MAX_N}
    for x, vector in (("bf16", 8), ("bf16", 1), ("fp32", 4)):
        single = [*range(1, 8192), *sorted(around | {*range(8192, MAX_N, 7)})]
        for N in single if vector == 1 else range(1, MAX_N + 1, 8):
            spec = NormSpec("layernorm", N if vector == 1 else N + 7, x, x, x, vector)
            norms_config.check(spec, norms.plan(spec))


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("N", [1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144])
def test_variants_are_valid_and_begin_with_the_plan(kind, N):
    spec = NormSpec(kind, N, "bf16", "fp32", "fp32", 8)
    found = norms.variants(spec)
    assert found[0] == norms.plan(spec) and len(found) == len(set(found)) >= 4
    for config in found:
        norms_config.check(spec, config)


@pytest.mark.parametrize("change", [dict(load="tma"), dict(rows_per_thread=0), dict(threads_per_row=16),
                                    dict(threads=100), dict(load="shared", rows_per_thread=32)])
def test_a_config_that_cannot_serve_is_refused(change):
    spec = NormSpec("rmsnorm", 4096, "bf16", "bf16", None, 8)
    with pytest.raises(ValueError):
        norms_config.check(spec, replace(norms_config.Config(128, 128), **change))


def test_cp_async_needs_four_bytes():
    with pytest.raises(ValueError, match="4 bytes"):
        norms_config.check(NormSpec("rmsnorm", 101, "bf16", vector=1), norms_config.Config(32, 128, load="shared"))


@pytest.mark.parametrize("error, bad", [
    (ValueError, dict(kind="batchnorm")), (ValueError, dict(vector=3)), (ValueError, dict(vector=16)),
    (ValueError, dict(vector=0)),
    (NotImplementedError, dict(N=MAX_N + 1)), (NotImplementedError, dict(N=0)), (TypeError, dict(x="e4m3")),
    (TypeError, dict(weight="int32")), (TypeError, dict(x=None))])
def test_a_spec_that_is_not_supported_says_so(error, bad):
    with pytest.raises(error, match=next(iter(bad))if "N" not in bad else "N ="):
        NormSpec(**{**dict(kind="rmsnorm", N=64, x="bf16", vector=8), **bad})
