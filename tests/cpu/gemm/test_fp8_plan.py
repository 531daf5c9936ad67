"""The float8 GEMM's plan: every tile once, shared memory within bounds, a choice for every shape."""
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tkq.gemm import candidates
from tkq.gemm.dense.config import SHARED_BYTES
from tkq.gemm.dense.plan import takes_counter
from tkq.gemm.fp8 import plan as fp8_plan
from tkq.gemm.fp8 import small_m_plan
from tkq.gemm.fp8.catalog import shipped, traits
from tkq.gemm.fp8.config import Fp8Config
from tkq.gemm.fp8.plan import (
    BLOCKS,
    FAST,
    PROMOTED,
    SMALL,
    best_tile,
    cycles,
    fit_to_spec,
    plan,
    planned_kernel,
    table,
    tiles,
)
from tkq.gemm.fp8.spec import BYTES, OUT, Fp8Spec, granularity
from tkq.gemm.fp8.stored import CONFIGS
from tkq.gemm.grouped.spec import GroupedSpec
from tkq.gemm.grouped.stored import CONFIGS as GROUPED_CONFIGS
from tkq.gemm.raster import raster
from tkq.granularity import PRODUCTS, scales_of

ROW = Fp8Spec(**scales_of("row"))
BLOCK, BOTH_1X128 = (Fp8Spec(**scales_of(pair), promote=True) for pair in ("1x128_128x128", "1x128_1x128"))
SPECS = [Fp8Spec(out=out, **scales_of(s), promote=p, store=store) for out in OUT for s in PRODUCTS
         for p in ((True,) if "128" in s else (False, True)) for store in ("tma", "direct")]


@settings(max_examples=300)
@given(st.sampled_from(SPECS), st.integers(1, 20000), st.integers(1, 40000), st.integers(1, 2000),
       st.sampled_from((1, 2, 78, 132)))
def test_a_plan_fits(spec, m, n, k, num_sms):
    config = best_tile(spec, m, n, 16 * k, num_sms)
    assert config.check(spec) is config and config.shared_bytes(spec) <= SHARED_BYTES
    assert fit_to_spec(config, spec) == config  # what was chosen last fits what was chosen before
    few = small_m_plan.plan(spec, m, n, 16 * k, num_sms)  # tests/cpu/gemm/test_fp8_small_m_plan.py
    assert plan(spec, m, n, 16 * k, num_sms) == (few or config)
    recipe, blocks = planned_kernel(spec, m, n, 16 * k, num_sms, config)
    rows, cols = tiles(config, m, n)
    assert blocks % config.cluster == 0 and 0 < blocks <= max(num_sms, config.cluster)
    assert rows * cols * config.cluster >= blocks and recipe.args == (spec, config)


@settings(max_examples=60)
@given(st.sampled_from(FAST + BLOCKS + PROMOTED + SMALL), st.integers(1, 3000), st.integers(1, 3000))
def test_every_tile_once(config, m, n):
    rows, cols = tiles(config, m, n)
    seen = [raster(i, rows, cols, config.raster_group) for i in range(rows * cols)]
    assert sorted(seen) == [(r, c) for r in range(rows) for c in range(cols)]
    down, right = (1, config.cluster) if config.cluster_along_n else (config.cluster, 1)
    assert rows * down * config.m >= m and cols * right * config.n >= n


@pytest.mark.parametrize("config", FAST + BLOCKS + PROMOTED + SMALL, ids=lambda x: x.name)
def test_stores_cover_a_part(config):
    for out in OUT:
        store_n = config.store_n(out)
        assert store_n == 0 or (config.part % store_n == 0 and 32 <= store_n * BYTES[out] <= 128)


@given(st.sampled_from((32, 64, 96, 128, 192, 256)), st.sampled_from((1, 2)), st.integers(1, 5), st.sampled_from(OUT))
def test_a_buffer_is_written_when_its_store_has_read_it(n, m_subtiles, buffers, out):
    """Subtiles go out in their order, tile after tile; a thread waits for its oldest stores in flight."""
    config = Fp8Config(m=128 * m_subtiles, n=n, store_buffers=buffers)
    order = [i for _ in range(4) for i in range(config.n_stores(out))]
    for at, i in enumerate(order):
        mine = [j for j in range(at) if order[j] % buffers == i % buffers]
        assert 0 <= config.stores_in_flight(i, out) < buffers
        assert not mine or at - 1 - mine[-1] >= config.stores_in_flight(i, out)
        if len(order) > 3 * buffers and config.n_stores(out) % buffers == 0:
            assert config.stores_in_flight(i, out) == buffers - 1  # no more is waited for than must be


@pytest.mark.parametrize("config",
                         (BLOCKS[0], PROMOTED[1], replace(BLOCKS[0], store_row_bytes=128, store_buffers=1), Fp8Config(
    m=256, n=128, stages=3, split=2, promotion_unroll=4, store_row_bytes=64)),
                         ids=lambda x: f"{x.name}_{x.store_row_bytes}")
def test_what_waits_is_written_before_its_sums_begin(config):
    parts = config.m_subtiles * config.split
    for out in ("bf16", "fp32"):
        for n in range(config.n_stores(out) + 1):
            some = replace(config, overlap_epilogue=n)
            under = [some.stores_under_part(i, out) for i in range(parts)]
            # in order
            assert list(itertools.chain(*under)) == list(range(config.n_stores(out) - n, config.n_stores(out)))
            assert all(j * config.store_n(out) // config.part >= i for i in range(parts) for j in under[i])
            assert some.stores_before_product(out) or max(map(len, under)) - min(map(len, under)) <= 1
            assert some.check(replace(BLOCK, out=out)).overlap_epilogue == n
        with pytest.raises(ValueError, match="fp8_gemm: overlap_epilogue does not fit"):
            replace(config,
                    overlap_epilogue=config.n_stores(out) + 1).check(replace(BLOCK, out=out))


def test_quarters_are_written_early():
    """Most under the first product, beside which there are registers."""
    waits = {n: [len(replace(BLOCKS[0], overlap_epilogue=n).stores_under_part(i, "bf16")) for i in range(4)]
             for n in (7, 6, 1)}
    assert waits == {7: [3, 2, 1, 1], 6: [2, 2, 1, 1], 1: [0, 0, 0, 1]}
    assert BLOCKS[0].stores_before_product("bf16")
    assert not BLOCKS[0].stores_before_product("fp32") and not PROMOTED[1].stores_before_product("bf16")


def test_what_waits():
    """Subtiles that their own warps store, of sums that are promoted and of curved activations."""
    block, row = BLOCK, ROW
    for activation in (None, "relu", "gelu"):
        for size, out, overlap_epilogue in ((4096, "bf16", 7), (4096, "fp16", 7), (4096, "fp32", 8),
                                            (8192, "bf16", 4), (8192, "fp32", 6)):
            found = plan(replace(block, activation=activation, out=out), size, size, size, 132)
            assert (found.overlap_epilogue, found.store_per_warp) == (overlap_epilogue, True)
        found = plan(replace(row, activation=activation), 4096, 4096, 4096, 132)
        assert (found.overlap_epilogue, found.store_per_warp) == ((4, True) if activation == "gelu" else (1, False))
    silu = [plan(replace(block, activation="silu", out=out), size, size, size, 132)
            for size, out in ((4096, "bf16"), (4096, "fp16"), (8192, "bf16"))]
    assert [(x.overlap_epilogue, x.store_per_warp) for x in silu] == [(6, True), (0, True), (4, True)]
    for out, store in (("e4m3", "tma"), ("bf16", "direct")):
        for spec in (block, row):
            found = plan(replace(spec, activation="gelu", out=out, store=store), 4096, 4096, 4096, 132)
            assert not (found.overlap_epilogue or found.store_per_warp)
    found = plan(block, 16384, 16384, 16384, 132)
    assert found.wave_sync and not (found.overlap_epilogue or found.store_per_warp)
    with pytest.raises(ValueError, match="fp8_gemm: wave_sync does not fit"):
        replace(BLOCKS[0], overlap_epilogue=1, wave_sync=16).check(block)


def test_what_cannot_wait():
    """Nothing that another kernel would take for something else: sums of groups do not roll."""
    grouped, both = GroupedSpec("m", "e4m3", "e4m3", "bf16", "1x128", "128x128"), BOTH_1X128
    rolls = replace(PROMOTED[1], store_buffers=1, overlap_epilogue=1)
    for spec, config in ((grouped, rolls), (grouped, replace(rolls, overlap_epilogue=0)), (both, rolls),
                         (BLOCK,
                          Fp8Config(m=256, n=24, promotion_unroll=4, overlap_epilogue=1)),
                         (grouped, Fp8Config(split=2, store_row_bytes=64, overlap_epilogue=1, wgmma_in_flight=0))):
        with pytest.raises(ValueError, match="fp8_gemm: (overlap_epilogue|promotion_unroll|n) does not fit"):
            config.check(spec)
    assert not GROUPED_CONFIGS.fits(rolls, grouped, 256)
    gelu = replace(BLOCK, activation="gelu")
    tried = [x for x in candidates.of_fp8_gemm(gelu, 4096, 4096, 4096, 132) if x.promotion_unroll == 4]
    assert {x.overlap_epilogue for x in tried} == {0, 7} and {x.raster_group for x in tried
                                                              if x.overlap_epilogue} >= {4, 16}


EPILOGUES = ((None, None), ("bf16", None), ("fp32", "relu"), ("fp16", "silu"), (None, "gelu_tanh"))
COVERED = frozenset().union(*(traits(*kernel.recipe.args) for kernel in shipped()))


ROWS, STEPS_OF_16 = (1, 16, 33, 64, 65, 128, 300, 1000, 8192), (1, 8, 64, 1024)
COLUMNS = (16, 40, 64, 256, 528, 1000, 4096, 8192, 28672)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_what_a_plan_chooses_is_shipped(epilogue):
    """Or is made of parts that are, in pairs: its tile with its scales, its way out, its epilogue."""
    lacks = {}
    for spec, m, n, k in itertools.product(SPECS, ROWS, COLUMNS, STEPS_OF_16):
        spec = replace(spec, bias=epilogue[0], activation=epilogue[1])
        config = best_tile(spec, m, n, 16 * k, 132)
        if missing := traits(spec, config) - COVERED:
            lacks[spec, config] = missing
    assert not lacks


def test_what_it_chooses():
    row, block = ROW, BLOCK
    assert plan(row, 8192, 8192, 8192, 132).name == "128x256_cluster2_overlap1_pdl"
    assert plan(block, 4096, 4096, 4096, 132).name == "128x256_cluster2_overlap7_pdl_split4_promotion4_store_per_warp"
    assert plan(block, 8192, 8192, 8192, 132).name == "128x192_cluster2_overlap4_pdl_split2_promotion8_store_per_warp"
    for m, n, k in ((16384,) * 3, (8192, 28672, 8192), (8192, 8192, 28672)):
        assert plan(block, m, n, k, 132).name == "128x192_cluster2_pdl_split2_promotion8_wave_sync"
    for activation, overlap_epilogue in ((None, 1), ("relu", 1), ("gelu", 4)):
        assert plan(replace(row, activation=activation), 4096, 4096, 4096, 132).overlap_epilogue == overlap_epilogue
    assert plan(row, 1, 8192, 8192, 132).m == 16 and plan(block, 64, 8192, 8192, 132).m == 64
    assert best_tile(row, 1, 16, 16, 132).cluster == 1


def test_which_products_keep_pace():
    """Of many steps, of which each round reads more than half of L2 holds; with the tile that the plan has."""
    block, row = BLOCK, ROW
    sizes = {(16384,) * 3: True, (8192, 28672, 8192): True, (8192, 8192, 28672): True, (8192,) * 3: False,
             (4096,) * 3: False, (32768, 32768, 1024): False, (64, 500000, 65536): False, (64, 28672, 65536): False,
             (4096, 4096, 131072): True}
    for spec, (size, keeps) in itertools.product((block, row, Fp8Spec()), sizes.items()):
        config, (recipe, _) = plan(spec, *size, 132), planned_kernel(spec, *size, 132)
        assert (config.wave_sync > 0) == takes_counter(recipe) == keeps and recipe.args == (spec, config)
        assert recipe.module == "tkq.gemm.fp8.kernel" and not traits(spec, config) - COVERED
        if keeps:
            best = min((c for c in table(spec)), key=lambda c: cycles(c, *size, 132, spec.promote))
            assert (config.m, config.n) == (best.m, best.n)
            assert config.wave_sync == (8 if spec is block else 16) and config.raster_group == (10 if config.n == 192
                                                                                                else 8)
    for other in (BOTH_1X128, replace(ROW, promote=True), Fp8Spec(out="fp32")):
        assert not plan(other, 16384, 16384, 16384, 132).wave_sync
    for wave_sync, other in ((-1, block), (8, BOTH_1X128)):
        with pytest.raises(ValueError, match="fp8_gemm: wave_sync does not fit"):
            fit_to_spec(replace(PROMOTED[1], wave_sync=wave_sync), other)


def test_kernels_that_keep_pace_are_shipped_as_planned():
    names = {kernel.recipe for kernel in shipped()}
    for spec in (BLOCK, ROW, Fp8Spec()):
        assert planned_kernel(spec, 16384, 16384, 16384, 132)[0] in names


def test_what_a_round_reads():
    for config, (m, n, k), reads in ((PROMOTED[1], (16384,) * 3, (9 * 256 + 8 * 192) * 16384),
                                     (BLOCKS[0], (8192,) * 3, (9 * 256 + 8 * 256) * 8192),
                                     (FAST[1], (8192, 300, 128), (33 * 256 + 300) * 128),
                                     (PROMOTED[1], (256, 192, 128), (256 + 192) * 128)):
        assert fp8_plan.wave_bytes(config, m, n, k, 132) == min(reads, (m + n) * k)


def test_tune_tries_it_where_rounds_are_many():
    spec = ROW
    for size, paces in (((16384,) * 3, {8, 16}), ((4096,) * 3, set())):
        found = candidates.of_fp8_gemm(spec, *size, 132)
        assert {x.wave_sync for x in found if getattr(x, "wave_sync", 0)} == paces
        assert all(CONFIGS.fits(x, spec, size[0]) for x in found)


def test_tune_tries_tiles_that_share_where_there_is_one_round():
    for promote in (False, True):
        for size, tried in (((1024, 1024, 4096), True), ((2048, 1024, 16384), True), ((16384,) * 3, False)):
            spec = Fp8Spec(promote=promote)
            found = {fit_to_spec(x, spec) for x in fp8_plan.SHARING} & set(candidates.of_fp8_gemm(spec, *size, 132))
            assert bool(found) == (tried and not promote)


def test_the_model_grows_with_the_problem():
    for config in FAST:
        assert cycles(config, 4096, 4096, 4096, 132, False) < cycles(config, 4096, 4096, 8192, 132, False)
        assert cycles(config, 4096, 4096, 4096, 132, False) < cycles(config, 8192, 8192, 4096, 132, False)


@pytest.mark.parametrize("change, field", (
    (dict(m=96), "m"), (dict(n=24), "n"), (dict(stages=1), "stages"), (dict(cluster=3), "cluster"),
    (dict(consumers=3), "consumers"), (dict(stagger_stages=4), "stagger_stages"),
    (dict(wgmma_in_flight=2), "wgmma_in_flight"), (dict(split=2), "split"),
    (dict(promotion_unroll=2), "promotion_unroll"), (dict(store_buffers=0), "store_buffers"),
    (dict(store_row_bytes=16), "store_row_bytes")))
def test_what_does_not_fit_is_named(change, field):
    with pytest.raises(ValueError, match=f"fp8_gemm: {field} does not fit"):
        Fp8Config(**change).check(Fp8Spec())
    with pytest.raises(ValueError, match="bytes of shared memory"):
        Fp8Config(stages=6).check(Fp8Spec())


def test_fitted_keeps_within_shared_memory():
    for spec in SPECS:
        for config in table(spec) + SMALL:
            assert fit_to_spec(config, spec).shared_bytes(spec) <= SHARED_BYTES


def test_specs():
    with pytest.raises(NotImplementedError, match="out is 'int8'"):
        Fp8Spec(out="int8")
    with pytest.raises(NotImplementedError, match="promote is False"):
        Fp8Spec(**scales_of("1x128_128x128"))
    with pytest.raises(NotImplementedError, match="scale_a is '128x128' and scale_b '1x128', supported are tensor with "
                                                  "tensor, row with row, 1x128 with 128x128, 1x128 with 1x128$"):
        Fp8Spec(scale_a="128x128", scale_b="1x128", promote=True)


@given(st.integers(1, 600), st.integers(1, 600), st.integers(1, 40))
def test_granularities_that_share_shapes_mean_the_same(m, n, k):
    steps = -(-16 * k // 128)
    assert granularity(m, n, 16 * k, (m, 1), (1, n)) in (PRODUCTS["row"], PRODUCTS["tensor"])
    assert granularity(m, n, 16 * k, (m, steps), (steps, n)) in PRODUCTS.values()
    assert granularity(m, n, 16 * k, (m + 1, 1), (1, n)) is None


def test_names_are_unique():
    names = [kernel.name for kernel in shipped()]
    assert len(set(names)) == len(names)
