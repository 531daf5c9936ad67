"""Which tile of a float8 GEMM, how many stages, in which order: pure Python, no torch, no DSL."""
from dataclasses import replace
from typing import Optional

from ...runtime.compile.recipe import Recipe
from ..dense.config import SHARED_BYTES
from ..dense.plan import SHARED
from ..raster import even_blocks
from . import small_m_plan
from .config import STEP, Fp8Config, can_overlap_epilogue
from .small_m_config import SmallMFp8Config
from .spec import BYTES, Fp8Spec

MACS = 4096  # a clock and SM: the tensor cores, 8-bit operands
L2 = 42  # bytes a clock and SM: what all of them together get from L2, shared out
TILE_CLOCKS = 3000  # a tile's beginning and end, as far as nothing hides them
SLOWER = {False: 1.3, True: 1.5}  # than the tensor cores could: plain sums and promoted, measured
PIPELINED = {2: 0.96, 4: 1.01}  # of that, by parts of a step: quarters read A four times
CLUSTER = 0.98  # of a step's time where two blocks share tiles: 0.92 to 0.99, the larger the operands the less


# The larger first. What each is worth on an H100 is in docs/attempts.md.
FAST = (
    Fp8Config(wgmma_in_flight=0, overlap_epilogue=1, pdl=True),
    Fp8Config(m=256, n=128, cluster_along_n=True, wgmma_in_flight=0, overlap_epilogue=1, pdl=True),
    Fp8Config(n=128, stages=6, cluster=1, pdl=True),
    Fp8Config(n=64, stages=7, cluster=1, pdl=True),
)
# The smaller ones, of which two share A or B: what `tune` tries beside those.
SHARING = tuple(replace(tile, cluster=2, cluster_along_n=cluster_along_n) for tile in FAST[2:]
                for cluster_along_n in (False, True))
# for 1x128 and 128x128 scales, beside those of PROMOTED
BLOCKS = (Fp8Config(split=4, store_row_bytes=64, pdl=True, promotion_unroll=4),)
PROMOTED = (
    Fp8Config(split=2, cluster=1, store_row_bytes=64, pdl=True),
    Fp8Config(n=192, split=2, store_row_bytes=64, pdl=True, promotion_unroll=8),
    Fp8Config(m=256, n=128, stages=3, cluster=1, pdl=True),
    Fp8Config(n=128, stages=5, cluster=1, pdl=True),
    Fp8Config(n=64, stages=7, cluster=1, pdl=True),
)
# Where blocks would drift apart (see ``needs_wave_sync``): by scales and whether sums are promoted, wave_sync; by a
# tile's columns, how many of them to a band, so that a wave reads about the least.
WAVE_SYNC = {("128x128", True): 8, ("tensor", False): 16, ("row", False): 16}
WAVE_SYNC_BANDS = {192: 10}
# of K in all of a block's tiles; of A and B in a wave: half of an H100's L2
WAVE_SYNC_STEPS, WAVE_SYNC_BYTES = 3000, 25e6
# M up to 64, where no blocks share K (``small_m_plan``): B comes once, and is all that counts
SMALL = (Fp8Config(m=64, n=64, stages=11, consumers=1, cluster=1, stagger_stages=0, pdl=True),)


def table(spec: Fp8Spec) -> tuple:
    """The tiles, but for ``SMALL``."""
    return FAST if not spec.promote else BLOCKS + PROMOTED if spec.scale_b == "128x128" else PROMOTED


def tiles(config: Fp8Config, M: int, N: int):
    """(rows, columns) of the clusters' tiles that cover C."""
    down, right = (1, config.cluster) if config.cluster_along_n else (config.cluster, 1)
    return -(-M // (config.m * down)), -(-N // (config.n * right))


def cycles(config: Fp8Config, M: int, N: int, K: int, num_sms: int, promote: bool) -> float:
    """Clocks that a GEMM should take: waves of tiles, each step as long as what is slowest in an SM.

    SLOWER and TILE_CLOCKS fit what 8192^3 and 4096^3 took on an H100 (see FAST) to within 3 %."""
    m, n, m_subtiles = config.m, config.n, config.m_subtiles * config.consumers
    read = m * STEP + m_subtiles * n * STEP  # each 64 rows of A meet all of B
    from_l2 = (m / (config.cluster if config.cluster_along_n else 1) + n / (1 if config.cluster_along_n
                                                                            else config.cluster)) * STEP
    slower = SLOWER[promote] * (CLUSTER if config.cluster > 1 else 1)
    slower *= PIPELINED[config.m_subtiles * config.split] if config.promotion_unroll else 1
    products = slower * m * n * STEP / MACS
    step = max(products, (read + (m + n) * STEP) / SHARED, from_l2 / L2)
    return waves(config, M, N, num_sms) * (-(-K // STEP) * step + TILE_CLOCKS)


def waves(config: Fp8Config, M: int, N: int, num_sms: int) -> int:
    """Tiles that the busiest cluster takes, one after the other."""
    rows, cols = tiles(config, M, N)
    return -(-rows * cols // max(1, num_sms // config.cluster))


def plan(spec: Fp8Spec, M: int, N: int, K: int, num_sms: int) -> Fp8Config | SmallMFp8Config:
    """The configuration for a problem, what should be fastest: blocks that share K where rows or tiles are few
    (``small_m_plan``), else a tile."""
    few = small_m_plan.plan(spec, M, N, K, num_sms)
    return best_tile(spec, M, N, K, num_sms) if few is None else few


def best_tile(spec: Fp8Spec, M: int, N: int, K: int, num_sms: int) -> Fp8Config:
    """The tile of the fewest ``cycles``, the first of its table if equal; then whether its blocks keep in step, then
    how its results go out, then as many stages as there is room for. No choice looks at a later one."""
    table_of = (*(SMALL if M <= 64 else ()), *table(spec))
    useful = [tile for tile in table_of if cluster_is_useful(tile, M, N)]
    tile = min(useful, key=lambda tile: cycles(tile, M, N, K, num_sms, spec.promote))
    if needs_wave_sync(tile, spec, M, N, K, num_sms):
        tile = with_wave_sync(tile, spec)
    return configure(tile, spec)


def configure(tile: Fp8Config, spec: Fp8Spec) -> Fp8Config:
    """A tile of a table as a spec's kernel has it."""
    return fit_to_spec(configure_epilogue(tile, spec), spec)


def needs_wave_sync(config: Fp8Config, spec: Fp8Spec, M: int, N: int, K: int, num_sms: int) -> bool:
    """Do blocks drift apart until what one has read is gone from L2 when another comes for it? Over many steps, where a
    wave's A and B are more than the half of L2 holds that an SM reads through. Clusters with an overlapped epilogue or
    a pipelined promotion were timed."""
    if config.cluster == 1 or (spec.scale_b, spec.promote) not in WAVE_SYNC:
        return False
    overlaps = config.overlap_epilogue > 0 and can_overlap_epilogue(spec, config)
    pipelines = config.promotion_unroll > 0 and spec.pipelines_promotion
    many = waves(config, M, N, num_sms) * -(-K // STEP) > WAVE_SYNC_STEPS
    return (overlaps or pipelines) and many and wave_bytes(config, M, N, K, num_sms) > WAVE_SYNC_BYTES


def with_wave_sync(config: Fp8Config, spec: Fp8Spec) -> Fp8Config:
    """The same tile, with wave sync."""
    return replace(config, raster_group=WAVE_SYNC_BANDS.get(config.n, config.raster_group),
                   wave_sync=WAVE_SYNC.get((spec.scale_b, spec.promote), 16))


def wave_bytes(config: Fp8Config, M: int, N: int, K: int, num_sms: int) -> int:
    """Of A and B, that a wave of tiles reads: ``raster_group`` columns of clusters' tiles, and as many rows as it
    has."""
    down, right = (1, config.cluster) if config.cluster_along_n else (config.cluster, 1)
    cols = min(config.raster_group, tiles(config, M, N)[1])
    rows = -(-(num_sms // config.cluster) // cols)
    return (min(M, rows * down * config.m) + min(N, cols * right * config.n)) * K


def configure_epilogue(config: Fp8Config, spec: Fp8Spec) -> Fp8Config:
    """How results go out. Of an activation that takes longer than a step, a quarter of a subtile's under each; with
    a pipelined promotion, ``pending_stores`` under the next one's first step. (With wave sync neither that nor
    store_per_warp was timed.)"""
    may_wait = can_overlap_epilogue(spec, config) and config.store_n(spec.out) > 0 and not config.wave_sync
    if config.promotion_unroll:
        pending = pending_stores(config, spec) if may_wait else 0
        return replace(config, overlap_epilogue=pending, store_per_warp=may_wait)
    if config.overlap_epilogue and spec.activation not in (None, "relu"):
        return replace(config, overlap_epilogue=4, store_per_warp=may_wait)
    return config


def pending_stores(config: Fp8Config, spec: Fp8Spec) -> int:
    """How many of a tile are stored under the next one. Most: with more of them some epilogues spill. Of quarters at
    4096^3, times torch's speed: seven of eight 1.063 and six 1.060, with gelu 1.023 and five 1.020; with silu six,
    1.022. Of fp16, which would show that silu's error, none: the exact one has 1.012, waiting 1.009
    (docs/attempts/gemm.md)."""
    count, quarters = config.n_stores(spec.out), config.m_subtiles * config.split == 4
    if BYTES[spec.out] == 4:
        return count // 2
    if not quarters:
        return count * 2 // 3
    if spec.activation == "silu":
        return count * 3 // 4 if spec.out == "bf16" else 0
    return count * 7 // 8


def cluster_is_useful(config: Fp8Config, M: int, N: int) -> bool:
    """Has each block of a cluster a part of C?"""
    down, right = (1, config.cluster) if config.cluster_along_n else (config.cluster, 1)
    return config.m * (down - 1) < M and config.n * (right - 1) < N


def fit_to_spec(config: Fp8Config | SmallMFp8Config, spec: Fp8Spec) -> Fp8Config | SmallMFp8Config:
    """The configuration with as many stages as this spec's output and scales leave room for; one for small M is
    checked, and stays what it is."""
    if isinstance(config, SmallMFp8Config):
        return config.check(spec)
    if spec.store == "tma" and not config.store_n(spec.out):
        config = replace(config, n=max(config.n, 32))
    if config.promotion_unroll and not spec.pipelines_promotion:
        config = replace(config, promotion_unroll=0, split=1, store_row_bytes=128, overlap_epilogue=0,
                         store_per_warp=False)
    if spec.out == "e4m3" and spec.bias:  # and scales, for the 128 columns of a subtile, are too many registers
        config = replace(config, store_row_bytes=min(config.store_row_bytes, 64))
    while config.stages > 2 and config.shared_bytes(spec) > SHARED_BYTES:
        config = replace(config, stages=config.stages - 1, stagger_stages=min(config.stagger_stages, config.stages - 2))
    return replace(config, overlap_epilogue=config.overlap_epilogue if can_overlap_epilogue(spec, config) else 0,
                   store_per_warp=config.store_per_warp and spec.store == "tma").check(spec)


def planned_kernel(spec: Fp8Spec, M: int, N: int, K: int, num_sms: int,
                   config: Optional[Fp8Config | SmallMFp8Config] = None):
    """(what to compile and call, how many blocks) for a problem; config instead of the plan's. 0 blocks: as many as the
    sizes make."""
    config = config.check(spec) if config else plan(spec, M, N, K, num_sms)
    if isinstance(config, SmallMFp8Config):
        return small_m_plan.recipe(spec, config), 0
    rows, cols = tiles(config, M, N)
    return recipe_of(spec, config), even_blocks(rows * cols, num_sms, config.cluster)


def recipe_of(spec: Fp8Spec, config: Fp8Config) -> Recipe:
    return Recipe(f"tkq.gemm.fp8.kernel:{'WithCounter' if config.wave_sync else 'Fp8Gemm'}", (spec, config))
