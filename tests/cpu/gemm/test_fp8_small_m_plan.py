"""Float8 products of small M: which of them share K, in which shape. Pure Python."""
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tkq.gemm import candidates
from tkq.gemm.dense.small_m_config import SLOT_BYTES
from tkq.gemm.dense.small_m_plan import FEWEST_STEPS, fit_to_spec, parts_of_k
from tkq.gemm.fp8 import plan as fp8_plan
from tkq.gemm.fp8.small_m_catalog import SHAPES, shipped, traits
from tkq.gemm.fp8.small_m_config import SmallMFp8Config
from tkq.gemm.fp8.small_m_plan import ROWS, TILES_STEPS, of_tiles, plan, splits, tiles
from tkq.gemm.fp8.spec import OUT, Fp8Spec
from tkq.gemm.fp8.stored import CONFIGS
from tkq.granularity import PRODUCTS, scales_of

SPECS = [Fp8Spec(**scales_of(s), promote=p) for s in PRODUCTS for p in (False, True) if p or s in ("tensor", "row")]
SPEC, BLOCK_SPEC = Fp8Spec(**scales_of("row")), Fp8Spec(**scales_of("1x128_128x128"), promote=True)
rows, sizes, steps = st.integers(1, 128), st.integers(1, 60000), st.integers(1, 2000)
many_rows, columns = st.one_of(rows, st.integers(129, 9000)), st.one_of(sizes, st.integers(1, 2000))


@given(st.sampled_from(SPECS), rows, sizes, steps, st.integers(1, 264))
def test_a_plan_fits(spec, M, N, k, num_sms):
    config = plan(spec, M, N, 16 * k, num_sms)
    if config is None:
        assert M > 32
        return
    blocks = -(-N // ROWS) * config.split
    assert config.check(spec) is config and config.m >= M and (config.m == 16 or config.m // 2 < M)
    assert config.split == 1 or -(-16 * k // 128) // config.split >= FEWEST_STEPS
    assert config.split == 1 or blocks <= num_sms or config.shared_bytes(spec) <= SLOT_BYTES
    assert all(end > first for first, end in parts_of_k(8 * k, config.split))
    assert fp8_plan.plan(spec, M, N, 16 * k, num_sms) == config


EPILOGUES = ((None, None), ("bf16", None), ("fp32", "relu"), ("fp16", "silu"), (None, "gelu_tanh"))
COVERED = frozenset().union(*(traits(*kernel.recipe.args) for kernel in shipped()))


@given(st.sampled_from(SPECS), st.sampled_from(OUT), st.sampled_from(EPILOGUES), many_rows, columns, steps)
def test_each_pair_of_what_it_chooses_is_shipped(spec, out, epilogue, M, N, k):
    spec = replace(spec, out=out, bias=epilogue[0], activation=epilogue[1])
    config = plan(spec, M, N, 16 * k, 132)
    assert config is None or not traits(spec, config) - COVERED


@given(st.sampled_from(SPECS), st.integers(129, 9000), st.integers(1, 9000), steps, st.integers(1, 264))
def test_a_plan_of_tiles_fits(spec, M, N, k, num_sms):
    """Half of the SMs have no tile of 64 columns, and most of them have a block now."""
    config, steps = of_tiles(spec, M, N, 16 * k, num_sms), -(-16 * k // 128)
    alone = tiles(M, N, ROWS)
    if config is None:
        assert steps < TILES_STEPS or 2 * alone > num_sms
        return
    assert config.check(spec) is config and config.tiled and config.split > 1 and steps >= TILES_STEPS
    assert 2 * alone <= num_sms and tiles(M, N, config.rows) * config.split <= num_sms
    assert config.split in (2, 8) or tiles(M, N, config.rows) * config.split <= num_sms // 2
    assert config.rows == ROWS or spec.promote
    assert all(end > first for first, end in parts_of_k(8 * k, config.split))
    assert fp8_plan.plan(spec, M, N, 16 * k, num_sms) == config



@given(st.sampled_from(SPECS), many_rows, columns, steps)
def test_what_it_chooses_is_shipped(spec, M, N, k):
    config = plan(spec, M, N, 16 * k, 132)
    if config:
        assert (config.m, config.rows, config.split, 2 if config.shared_bytes(spec) <= SLOT_BYTES else 1) in SHAPES
        assert (replace(spec, store="direct"), config) in {kernel.recipe.args for kernel in shipped()}


# On an H100 (docs/attempts/gemm.md): how many blocks share K; None: a tile was as fast
FAST = {(1, 8192, 8192): 1, (16, 8192, 8192): 1, (64, 8192, 8192): None, (128, 8192, 8192): None, (16, 1024, 8192): 2,
        (128, 1024, 8192): 4, (128, 256, 16384): 8, (16, 28672, 8192): 4, (64, 4096, 4096): None, (1, 28672, 8192): 4,
        (16, 128256, 4096): 1, (16, 6144, 4096): 1, (16, 14336, 4096): 1, (32, 4096, 14336): 1, (128, 4096, 4096): 2,
        (64, 6144, 4096): None}
BY_ROWS = dict(itertools.islice(FAST.items(), 8))
BY_BLOCKS = {**BY_ROWS, (16, 1024, 8192): 4, (64, 4096, 4096): 2}


@pytest.mark.parametrize("spec, measured", (
    (Fp8Spec(), FAST), (SPEC, BY_ROWS), (BLOCK_SPEC, BY_BLOCKS)))
def test_what_was_measured(spec, measured):
    """The quickest, or within 3 % of it."""
    for problem, split in measured.items():
        config = plan(spec, *problem, 132)
        assert (config and config.split) == split, (problem, config)
    assert fp8_plan.plan(spec, 64, 8192, 8192, 132) == fp8_plan.fit_to_spec(fp8_plan.SMALL[0], spec)


@given(st.floats(10, 150), st.integers(1, 2000), steps, st.integers(2, 264))
def test_blocks_that_share_k(rate, tiles, steps, num_sms):
    split = splits(rate, tiles, steps, num_sms)
    assert split == 1 or (steps // split >= FEWEST_STEPS and tiles * split <= num_sms)
    assert split in (1, 2) or tiles * split <= num_sms // 2
    assert splits(rate, tiles, steps + 1, num_sms) >= split  # more of K is never shared by fewer
    assert splits(rate, tiles + 1, steps, num_sms) <= split  # nor fewer columns
    assert splits(rate / 2, tiles, steps, num_sms) >= split  # nor what is read more slowly


@given(st.sampled_from(SPECS), rows, sizes, steps)
def test_launch(spec, M, N, k):
    recipe, blocks = fp8_plan.planned_kernel(spec, M, N, 16 * k, 132)
    few = recipe.module == "tkq.gemm.fp8.small_m_kernel"
    assert few == isinstance(fp8_plan.plan(spec, M, N, 16 * k, 132), SmallMFp8Config)
    assert (blocks == 0 and recipe.args[0].store == "direct") if few else blocks > 0
    tile = fp8_plan.best_tile(spec, M, N, 16 * k, 132)
    assert fp8_plan.planned_kernel(spec, M, N, 16 * k, 132, tile)[0].module == "tkq.gemm.fp8.kernel"


# Of more rows: (columns of a block, blocks that share K). Quicker ways are known and not planned for 384x1024x16384
# (four of 128 columns, 1.17 times) and 160x4096x4096 (two of 128, 1.24 times)
TILED = {(256, 512, 4096): (64, 4), (256, 512, 16384): (64, 4), (512, 512, 8192): (64, 2), (256, 1024, 8192): (64, 2),
         (512, 1024, 4096): (64, 2), (384, 1024, 16384): (64, 2), (192, 1024, 4096): (64, 2), (512, 2048, 8192): None,
         (4096, 512, 4096): None, (256, 512, 2048): None, (160, 4096, 4096): None}
TILED_BLOCKS = {**TILED, (512, 512, 8192): (128, 4), (256, 1024, 8192): (128, 4), (192, 1024, 4096): (128, 4)}


@pytest.mark.parametrize("spec, measured", ((SPEC, TILED), (BLOCK_SPEC, TILED_BLOCKS)))
def test_what_was_measured_of_more_rows(spec, measured):
    for problem, way in measured.items():
        config = plan(spec, *problem, 132)
        assert (config and (config.rows, config.split)) == way, (problem, config)
        built = fp8_plan.planned_kernel(spec, *problem, 132)[0].module
        assert built == ("tkq.gemm.fp8.small_m_kernel" if way else "tkq.gemm.fp8.kernel")


@pytest.mark.parametrize("M, most", ((1, 16), (40, 64), (128, 128), (129, 128), (2048, 128), (2049, 0)))
def test_tune_tries_every_way(M, most):
    found = [c for c in candidates.of_fp8_gemm(SPEC, M, 1024, 8192, 132) if isinstance(c, SmallMFp8Config)]
    assert {c.m for c in found} == ({most} if most else set())
    assert {(c.rows, c.split) for c in found} == (set(itertools.product((64, 128), (1, 2, 4, 8))) if most else set())
    assert all(CONFIGS.fits(c, SPEC, M) for c in found)
    assert all(CONFIGS.fits(c, SPEC, most + 1) == (most == 128) for c in found)


@pytest.mark.parametrize("change", (dict(m=24), dict(rows=96), dict(split=3), dict(stages=1), dict(parts=2)))
def test_a_config_that_does_not_fit_is_named(change):
    good = fit_to_spec(SmallMFp8Config(), SPEC)
    with pytest.raises(ValueError, match=f"fp8_gemm: {next(iter(change))} does not fit"):
        replace(good, **change).check(SPEC)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        replace(good, stages=40).check(SPEC)
