"""The GEMM's plan: pure Python, checked over all sizes."""
import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkq.gemm.dense import plan as plans
from tkq.gemm.dense import small_m_plan
from tkq.gemm.dense.catalog import shipped
from tkq.gemm.dense.config import SHARED_BYTES, Config
from tkq.gemm.dense.plan import TILES, best_tile, cycles, fit_to_spec, plan, planned_kernel, recipe, tiles
from tkq.gemm.dense.spec import DTYPES, OUT_DTYPES, GemmSpec, fits_tma, fits_tma_store, is_k_major
from tkq.gemm.epilogue.spec import Epilogue
from tkq.gemm.raster import even_blocks, raster

sizes = st.integers(1, 40000)
grids = st.integers(1, 70)


@given(grids, grids, st.integers(1, 20))
def test_raster_visits_each_tile_once(rows, cols, group):
    seen = [raster(i, rows, cols, group) for i in range(rows * cols)]
    assert sorted(seen) == list(itertools.product(range(rows), range(cols)))


@given(st.integers(20, 80), st.integers(20, 80), st.integers(1, 12), st.integers(1, 132), st.data())
def test_raster_keeps_a_wave_together(rows, cols, group, wave, data):
    """Any ``wave`` tiles in a row lie in at most one band's width (two where they cross into the next)."""
    start = data.draw(st.integers(0, rows * cols - wave))
    seen = [raster(i, rows, cols, group) for i in range(start, start + wave)]
    bands = {col // group for _, col in seen}
    assert len(bands) <= 2 + wave // (group * rows)
    if len(bands) == 1:
        width = min(group, cols - min(bands) * group)
        assert len({row for row, _ in seen}) <= -(-wave // width) + 1


@given(st.integers(1, 100000), st.integers(1, 264), st.sampled_from((1, 2)))
def test_even_blocks_are_the_fewest_that_need_no_more_rounds(tasks, num_sms, cluster):
    blocks = even_blocks(tasks, num_sms, cluster)
    workers, most = blocks // cluster, max(1, num_sms // cluster)
    waves = -(-tasks // most)
    assert blocks % cluster == 0 and 1 <= workers <= most
    assert workers * waves >= tasks > (workers - 1) * waves


def test_which_products_keep_pace():
    """Many steps, in long tiles: as measured."""
    spec = GemmSpec(b_major="k")
    for (m, n, k), paced in (((16384,) * 3, True), ((8192, 28672, 8192), True), ((8192, 8192, 28672), True),
                             ((8192,) * 3, False), ((4096,) * 3, False), ((65536, 4096, 4096), False)):
        config, (recipe, blocks) = plan(spec, m, n, k, 132), planned_kernel(spec, m, n, k, 132)
        assert plans.takes_counter(recipe) == (config.wave_sync > 0) == paced and recipe.args == (spec, config)
        assert recipe.module == "tkq.gemm.dense.kernel"
        assert not paced or blocks == (128 if k == 28672 else 132)
    for other in (dataclasses.replace(spec, epilogue=Epilogue(bias="bf16")),
                  dataclasses.replace(spec, epilogue=Epilogue("swiglu"))):
        assert not plan(other, 16384, 16384, 16384, 132).wave_sync
        with pytest.raises(ValueError, match="wave_sync does not fit"):
            Config(wave_sync=16).check(other)
    with pytest.raises(ValueError, match="wave_sync does not fit"):
        Config(wave_sync=-1).check(spec)


@given(st.integers(1, 132), st.integers(1, 2000))
def test_a_counter_of_rounds_comes_back_to_zero(workers, tasks):
    """Every block has a tile in each round that is counted, so it arrives as often as the others; and what waits for a
    round waits for fewer arrivals than take the counter back, as his own last one is still to come."""
    workers = min(workers, tasks)
    waves = tasks // workers
    arrivals = [min(waves, len(range(first, tasks, workers))) + 1 for first in range(workers)]
    assert set(arrivals) == {waves + 1}
    assert all((round + 1) * workers <= sum(arrivals) - workers for round in range(waves))


@pytest.mark.parametrize("tasks, num_sms, cluster, want", (
    (256, 132, 2, 128), (1024, 132, 2, 128), (512, 132, 1, 128), (132, 132, 1, 132), (133, 132, 1, 67), (3, 132, 2, 6),
    (5, 1, 2, 2), (7, 3, 2, 2)))
def test_even_blocks_of_known_grids(tasks, num_sms, cluster, want):
    assert even_blocks(tasks, num_sms, cluster) == want


@given(st.sampled_from(TILES), sizes, sizes)
def test_tiles_cover_the_result_and_no_more(config, M, N):
    (rows, cols), (height, width) = tiles(config, M, N), (config.m * config.cluster, config.n)
    assert (rows - 1) * height < M <= rows * height and (cols - 1) * width < N <= cols * width


@given(st.sampled_from(DTYPES), st.sampled_from(OUT_DTYPES), st.sampled_from(("tma", "rows", "direct")), sizes, sizes,
       st.integers(1, 5000), st.integers(1, 264))
def test_plan_fits(dtype, out, store, M, N, k, num_sms):
    spec = GemmSpec(dtype, out, store=store)
    config = best_tile(spec, M, N, 8 * k, num_sms)
    assert plan(spec, M, N, 8 * k, num_sms) == (small_m_plan.plan(spec, M, N, 8 * k, num_sms) if M <= 128 else config)
    assert config.shared_bytes(spec) <= SHARED_BYTES
    tile = dataclasses.asdict(config) | {"hold_in_registers": True, "overlap_epilogue": 0, "wave_sync": 0}
    assert Config(**tile) in TILES and config.overlap_epilogue == int(config.hold_in_registers)
    assert config.hold_in_registers == (out != "fp32" and store == "tma")
    assert config.m * (config.cluster - 1) < M  # no block is without rows
    others = [t for t in TILES if t.cluster == 1 or t.m < M]
    assert cycles(config, M, N, 8 * k, num_sms) == min(cycles(t, M, N, 8 * k, num_sms) for t in others)


@given(sizes, sizes, st.integers(1, 5000))
def test_plan_does_without_a_cluster_only_where_it_costs_a_round(M, N, k):
    config = best_tile(GemmSpec(), M, N, 8 * k, 132)
    if config.cluster == 1 and config.m == 128 and M > 128:
        pair = dataclasses.replace(config, cluster=2)
        assert cycles(pair, M, N, 8 * k, 132) > cycles(config, M, N, 8 * k, 132)


@pytest.mark.parametrize("size, name, blocks", (
    ((4096, 4096, 4096), "128x256_cluster2", 128), ((8192, 8192, 8192), "128x256_cluster2", 128),
    ((16384, 4096, 4096), "128x256_cluster2", 128), ((2048, 2048, 2048), "128x256_cluster2", 128),
    ((1280, 1280, 4096), "128x128_cluster2", 100), ((640, 6144, 4096), "128x256", 120),
    ((384, 5120, 4096), "128x128", 120), ((136, 16384, 4096), "128x256_cluster2", 128),
    ((1024, 1024, 1024), "64x128", 128), ((128, 16384, 4096), "small_m128x64_split1", 0),
    ((1, 8192, 8192), "small_m16x64_split1", 0), ((64, 8192, 8192), "small_m64x64_split1", 0)))
def test_launch_of_known_sizes(size, name, blocks):
    recipe, planned = planned_kernel(GemmSpec(), *size, 132)
    assert (recipe.args[1].name, planned) == (name, blocks)


@given(sizes, sizes, st.integers(1, 5000))
def test_cycles_are_at_least_the_tensor_cores(M, N, k):
    for config in TILES:
        assert cycles(config, M, N, 8 * k, 132) >= M * N * 8 * k / (plans.MACS * 132)


@pytest.mark.parametrize("change", (
    dict(m=96), dict(m=256), dict(n=320), dict(n=40), dict(stages=1), dict(cluster=3), dict(raster_group=0)))
def test_a_config_that_does_not_fit_is_named(change):
    with pytest.raises(ValueError, match=f"gemm: {next(iter(change))} does not fit"):
        dataclasses.replace(Config(), **change).check(GemmSpec())


def test_shared_memory_and_hold_are_checked():
    with pytest.raises(ValueError, match="bytes of shared memory"):
        Config(stages=5).check(GemmSpec())
    for spec in (GemmSpec(out="fp32"), GemmSpec(store="direct"), GemmSpec(store="rows")):
        with pytest.raises(ValueError, match="hold_in_registers"):
            Config().check(spec)
        assert not fit_to_spec(Config(), spec).hold_in_registers


@pytest.mark.parametrize("field, value", (("dtype", "fp32"), ("out", "e4m3"), ("a_major", "n"), ("b_major", "m"),
                                          ("load", "bulk"), ("store", "x")))
def test_a_spec_that_no_kernel_takes_is_named(field, value):
    with pytest.raises(NotImplementedError, match=f"{field} is '{value}'"):
        GemmSpec(**{field: value})


def test_elements_in_means_elements_out():
    with pytest.raises(NotImplementedError, match="store"):
        GemmSpec(load="direct")
    with pytest.raises(NotImplementedError, match="store"):
        GemmSpec(load="direct", store="rows")
    with pytest.raises(NotImplementedError, match="store is 'rows' and accumulate"):
        GemmSpec(store="rows", accumulate=True)
    spec = GemmSpec(load="direct", store="direct")
    assert planned_kernel(spec, 64, 64, 64, 132) == (recipe(spec, 64, 64, 64, 132), 0)
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


@pytest.mark.parametrize("address, pitch, lines, length, bytes, want", (
    (256, 1104, 9, 1104, 2, True), (256, 1104, 9, 1100, 2, False), (256, 1104, 9, 1100, 4, True),
    (256, 1104, 9, 1101, 4, False), (256, 1100, 1, 1100, 2, False), (256, 1, 1, 1, 2, False), (256, 9, 1, 8, 2, True),
    (256, 9, 2, 8, 2, False), (8, 1104, 9, 1104, 2, False)))
def test_what_tma_writes_and_nothing_else(address, pitch, lines, length, bytes, want):
    assert fits_tma_store(address, pitch, lines, length, bytes) is want


@given(st.integers(1, 5), st.integers(1, 5000), st.sampled_from((2, 4)))
def test_a_contiguous_result_goes_by_tma_where_its_rows_are_whole_units(rows, cols, bytes):
    assert fits_tma_store(1 << 20, cols, rows, cols, bytes) is (cols * bytes % 16 == 0)


def test_shipped_covers_the_plan():
    names = [x.name for x in shipped()]
    assert len(set(names)) == len(names)
    args = {x.recipe.args for x in shipped()}
    for out, a, b, size in itertools.product(OUT_DTYPES, "km", "kn", ((4096,) * 3, (2048, 1024, 64), (640, 6144, 64),
                                                                     (384, 5120, 64), (256, 128, 8))):
        if out != "fp16":
            assert recipe(GemmSpec("bf16", out, a, b), *size, 132).args in args
