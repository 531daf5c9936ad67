"""Which tile, how many stages, in which order: pure Python, no torch, no DSL.

The sizes come from a model of one SM's clocks (``cycles``), which knows what ranks the tiles of a Hopper GEMM:
a wgmma reads both operands from shared memory while TMA writes the next ones there.
"""
from dataclasses import replace
from typing import Optional

from ...runtime.compile.recipe import Recipe
from ..epilogue.spec import sources
from ..raster import even_blocks
from . import small_m_plan
from .config import STEP, Config, can_hold_in_registers, can_wave_sync, wide_residual
from .small_m_config import SmallMConfig, takes
from .spec import GemmSpec

MACS = 2048  # a clock and SM: the tensor cores, 16-bit operands
SHARED = 128  # bytes a clock and SM, reads and writes together
L2 = 64  # bytes a clock and SM
TILE_CLOCKS = 1500  # a tile's beginning and end, as far as nothing hides them
PARTED = ("BRA.DIV",)  # which a warp has that the compiler does not know to be whole: its lanes share no registers
WAVE_SYNC = 16  # blocks meet behind this part of each tile, 1 / 16
WAVE_SYNC_STEPS, WAVE_SYNC_K = 6000, 8192  # fewest steps of a block in all, and K, with wave sync


TILES = (  # the larger first, and with a cluster before without
    Config(pdl=True),
    Config(cluster=1, pdl=True),
    Config(n=128, stages=6),
    Config(n=128, stages=6, cluster=1),
    Config(m=64, n=128, stages=8, cluster=1),
)


def tiles(config: Config, M: int, N: int):
    """(rows, columns) of the clusters' tiles that cover C."""
    return -(-M // (config.m * config.cluster)), -(-N // config.n)


def cycles(config: Config, M: int, N: int, K: int, num_sms: int, batches: int = 1) -> float:
    """Clocks that a GEMM should take: waves of tiles, each step as long as what is slowest in an SM.

    A cluster shows only in the tiles that it rounds up and in L2, which never decides: 0.75 of the tensor cores'
    time for 128 x 256, 0.5 where two share B. What that is worth is measured, 1.5 to 4 % there, and not modelled."""
    m, n = config.m, config.n
    read = config.consumers * (64 + n) * STEP * 2  # each 64 rows of A meet all of B
    written = (m + n) * STEP * 2
    from_l2 = (m + n / config.cluster) * STEP * 2
    step = max(m * n * STEP / MACS, (read + written) / SHARED, from_l2 / L2)
    return waves(config, M, N, num_sms, batches) * (-(-K // STEP) * step + TILE_CLOCKS)


def plan(spec: GemmSpec, M: int, N: int, K: int, num_sms: int, batches: int = 1) -> Config | SmallMConfig:
    """The configuration for a problem that comes in by TMA, what should be fastest: the small-M kernel's where there is
    one (``small_m_plan``), else a tile."""
    if M <= small_m_plan.MOST_M and takes(spec):
        return small_m_plan.plan(spec, M, N, K, num_sms)
    return best_tile(spec, M, N, K, num_sms, batches)


def best_tile(spec: GemmSpec, M: int, N: int, K: int, num_sms: int, batches: int = 1) -> Config:
    """The tile of the fewest ``cycles``, the first of TILES if equal; then how its results go out, then whether its
    blocks keep in step. No choice looks at a later one.

    A cluster only where each of its blocks has rows of C."""
    allowed = [config for config in TILES
               if config.m * (config.cluster - 1) < M and not (config.n == 256 and wide_residual(spec))]
    tile = min(allowed, key=lambda x: cycles(x, M, N, K, num_sms, batches))
    wave_sync = WAVE_SYNC if needs_wave_sync(tile, spec, M, N, K, num_sms, batches) else 0
    return replace(configure(tile, spec), wave_sync=wave_sync)


def configure(tile: Config, spec: GemmSpec) -> Config:
    """A tile of TILES as a spec's kernel has it."""
    return fit_to_spec(configure_epilogue(tile, spec), spec)


def needs_wave_sync(config: Config, spec: GemmSpec, M: int, N: int, K: int, num_sms: int, batches: int = 1) -> bool:
    """Do blocks drift apart: the largest tiles, many and long? What it is worth is in docs/attempts.md."""
    largest = (config.n, config.cluster) == (256, 2)
    many = waves(config, M, N, num_sms, batches) * -(-K // STEP) > WAVE_SYNC_STEPS
    return largest and many and K >= WAVE_SYNC_K and can_wave_sync(spec)


def waves(config: Config, M: int, N: int, num_sms: int, batches: int = 1) -> int:
    """Tiles that the busiest cluster takes, one after the other."""
    rows, cols = tiles(config, M, N)
    return -(-batches * rows * cols // max(1, num_sms // config.cluster))


def fit_to_spec(config: Config | SmallMConfig, spec: GemmSpec) -> Config | SmallMConfig:
    """The configuration without what this spec's output does not allow; a small-M kernel's is checked, and stays what
    it is."""
    if isinstance(config, SmallMConfig):
        return config.check(spec)
    if not can_hold_in_registers(spec):
        config = replace(config, hold_in_registers=False, overlap_epilogue=0, defer_activation=False)
    return config.check(spec)


def configure_epilogue(config: Config, spec: GemmSpec) -> Config:
    """The configuration as this spec's epilogue wants it: a tile is stored under the next one's first steps of K, a
    subtile to a step; with an activation, which takes as long as several steps, a quarter or, gated, a half; all at
    once where it accumulates. What each is worth on an H100 is in docs/attempts.md."""
    e = spec.epilogue
    if spec.accumulate or not (config.hold_in_registers and can_hold_in_registers(spec)):
        return config
    return replace(config, overlap_epilogue=(2 if e.gate else 4) if e.curved else 1, defer_activation=e.curved)


def planned_kernel(spec: GemmSpec, M: int, N: int, K: int, num_sms: int,
                   config: Optional[Config | SmallMConfig] = None, batches: int = 1):
    """(what to compile and call, how many blocks; 0 where the kernel counts for itself) for a problem; config instead
    of the plan's."""
    if spec.load == "direct":
        return Recipe("tkq.gemm.dense.unaligned:UnalignedGemm", (spec,), sources=sources(spec.epilogue)), 0
    config = fit_to_spec(config, spec) if config else plan(spec, M, N, K, num_sms, batches)
    if isinstance(config, SmallMConfig):
        return small_m_plan.recipe(spec, config), 0
    rows, cols = tiles(config, M, N)
    return recipe_of(spec, config), even_blocks(batches * rows * cols, num_sms, config.cluster)


def recipe_of(spec: GemmSpec, config: Config) -> Recipe:
    return Recipe("tkq.gemm.dense.kernel:DenseGemm", (spec, config), sources=sources(spec.epilogue))


def takes_counter(recipe: Recipe) -> bool:
    """Does its kernel have wave sync, and so a counter among its arguments?"""
    return getattr(recipe.args[-1], "wave_sync", 0) > 0


def recipe(spec: GemmSpec, M: int, N: int, K: int, num_sms: int, config: Optional[Config] = None) -> Recipe:
    """The first half of ``planned_kernel``."""
    return planned_kernel(spec, M, N, K, num_sms, config)[0]
