"""The GEMM's plan: pure Python, checked over all sizes."""
import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkq.gemm import plan as plans
from tkq.gemm.plan import SHARED_BYTES, TILES, Config, cycles, fitted, plan, raster, recipe, shipped, tiles
from tkq.gemm.spec import DTYPES, OUT_DTYPES, GemmSpec, fits_tma, is_k_major

sizes = st.integers(1, 40000)
grids = st.integers(1, 70)


@given(grids, grids, st.integers(1, 20), st.booleans())
def test_raster_visits_each_tile_once(rows, cols, group, down):
    seen = [raster(i, rows, cols, group, down) for i in range(rows * cols)]
    assert sorted(seen) == list(itertools.product(range(rows), range(cols)))


@given(st.integers(20, 80), st.integers(20, 80), st.integers(1, 12), st.booleans(), st.integers(1, 132), st.data())
def test_raster_keeps_a_wave_together(rows, cols, group, down, wave, data):
    """Any ``wave`` tiles in a row lie in at most one band's width (two where they cross into the next)."""
    start = data.draw(st.integers(0, rows * cols - wave))
    seen = [raster(i, rows, cols, group, down) for i in range(start, start + wave)]
    along, across = (1, 0) if down else (0, 1)
    length = cols if down else rows
    bands = {t[across] // group for t in seen}
    assert len(bands) <= 2 + wave // (group * length)
    if len(bands) == 1:
        width = min(group, (rows if down else cols) - min(bands) * group)
        assert len({t[along] for t in seen}) <= -(-wave // width) + 1


@given(st.sampled_from(TILES + (Config(cluster=2), Config(cluster=2, share="a"))), sizes, sizes)
def test_tiles_cover_the_result_and_no_more(config, M, N):
    (rows, cols), (height, width) = tiles(config, M, N), config.cluster_tile
    assert (rows - 1) * height < M <= rows * height and (cols - 1) * width < N <= cols * width


@given(st.sampled_from(DTYPES), st.sampled_from(OUT_DTYPES), st.sampled_from(("tma", "elements")), sizes, sizes,
       st.integers(1, 5000), st.integers(1, 264))
def test_plan_fits(dtype, out, store, M, N, k, processors):
    spec = GemmSpec(dtype, out, store=store)
    config = plan(spec, M, N, 8 * k, processors)
    assert config.shared_bytes(spec) <= SHARED_BYTES
    assert dataclasses.replace(config, hold=True) in TILES
    assert config.hold == (out != "fp32" and store == "tma")
    assert cycles(config, M, N, 8 * k, processors) == min(cycles(t, M, N, 8 * k, processors) for t in TILES)


@pytest.mark.parametrize("size, tile", (
    ((4096, 4096, 4096), (128, 256)), ((8192, 8192, 8192), (128, 256)), ((16384, 4096, 4096), (128, 256)),
    ((2048, 2048, 2048), (128, 256)), ((1024, 1024, 1024), (64, 128)), ((64, 8192, 8192), (64, 128))))
def test_plan_of_known_sizes(size, tile):
    config = plan(GemmSpec(), *size, 132)
    assert (config.m, config.n) == tile


@given(sizes, sizes, st.integers(1, 5000))
def test_cycles_are_at_least_the_tensor_cores(M, N, k):
    for config in TILES:
        assert cycles(config, M, N, 8 * k, 132) >= M * N * 8 * k / (plans.MACS * 132)


@pytest.mark.parametrize("change", (
    dict(m=96), dict(m=64), dict(n=320), dict(n=40), dict(k=32), dict(stages=1), dict(cluster=3), dict(share="c"),
    dict(group=0), dict(buffers=3), dict(buffers=0), dict(lag=2), dict(lead=4)))
def test_a_config_that_does_not_fit_is_named(change):
    with pytest.raises(ValueError, match=f"gemm: {next(iter(change))} does not fit"):
        dataclasses.replace(Config(), **change).check(GemmSpec())


def test_shared_memory_and_hold_are_checked():
    with pytest.raises(ValueError, match="bytes of shared memory"):
        Config(stages=5).check(GemmSpec())
    for spec in (GemmSpec(out="fp32"), GemmSpec(store="elements")):
        with pytest.raises(ValueError, match="hold"):
            Config().check(spec)
        assert not fitted(Config(), spec).hold


@pytest.mark.parametrize("field, value", (("dtype", "fp32"), ("out", "e4m3"), ("a_major", "n"), ("b_major", "m"),
                                          ("load", "bulk"), ("store", "x")))
def test_a_spec_that_no_kernel_takes_is_named(field, value):
    with pytest.raises(NotImplementedError, match=f"{field} is '{value}'"):
        GemmSpec(**{field: value})


def test_elements_in_means_elements_out():
    with pytest.raises(NotImplementedError, match="store"):
        GemmSpec(load="elements")
    spec = GemmSpec(load="elements", store="elements")
    assert recipe(spec, 64, 64, 64, 132).args == (spec,)


@pytest.mark.parametrize("extent, stride, k_stride, want", (
    (5, 64, 1, True), (5, 1, 64, False), (5, 2, 64, None), (1, 999, 1, True), (1, 999, 3, False), (1, 1, 1, True),
    (5, 0, 1, True), (5, 1, 0, False), (5, 0, 0, None)))
def test_majorness(extent, stride, k_stride, want):
    assert is_k_major(extent, stride, k_stride) is want


@pytest.mark.parametrize("address, pitch, lines, bytes, want", (
    (256, 64, 9, 2, True), (256, 60, 9, 2, False), (256, 60, 9, 4, True), (264, 64, 9, 2, False), (256, 60, 1, 2, True),
    (256, 0, 9, 2, True), (8, 64, 1, 2, False)))
def test_what_tma_takes(address, pitch, lines, bytes, want):
    assert fits_tma(address, pitch, lines, bytes) is want


def test_shipped_covers_the_plan():
    names = [x.name for x in shipped()]
    assert len(set(names)) == len(names)
    args = {x.recipe.args for x in shipped()}
    for out, a, b, size in itertools.product(OUT_DTYPES, "km", "kn", ((4096,) * 3, (2048, 1024, 64), (64, 128, 8))):
        if out != "fp16":
            assert recipe(GemmSpec("bf16", out, a, b), *size, 132).args in args
