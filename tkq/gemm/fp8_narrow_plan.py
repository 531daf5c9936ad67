"""Which float8 kernel for few rows of A, M up to 128, where reading B is all that takes time. Pure Python."""
from dataclasses import replace

from ..runtime.recipe import Recipe
from .fp8_config import STEP
from .fp8_narrow_config import NarrowFp8Config
from .fp8_spec import Fp8Spec
from .narrow_config import WIDTHS
from .narrow_plan import ADD_UP, FEWEST_STEPS, HBM, ON_THE_WAY, PROCESSOR, SPLITS, blocks, fitted


def nanoseconds(config: NarrowFp8Config, N: int, K: int, processors: int) -> float:
    """As ``narrow_plan.nanoseconds``, of operands of a byte."""
    count, line = blocks(config, N), K / config.split  # bytes of a row in a block
    busiest = -(-count // processors) * (config.m + config.rows) * line
    return max(count * config.rows * line / HBM, busiest / PROCESSOR) + ADD_UP[config.m][SPLITS.index(config.split)]


def plan(spec: Fp8Spec, M: int, N: int, K: int, processors: int) -> NarrowFp8Config:
    """The configuration that should take least time; of equals the one that splits K least, of fewer columns."""
    m, steps = next(width for width in WIDTHS if width >= M), -(-K // STEP)
    allowed = [s for s in SPLITS if s == 1 or steps // s >= FEWEST_STEPS]
    configs = [NarrowFp8Config(m, rows, split, pdl=True) for split in allowed for rows in (64, 128)]
    best = min(configs, key=lambda config: nanoseconds(config, N, K, processors))
    two = fitted(best, spec)
    alone = two.stages * best.rows * STEP < ON_THE_WAY and blocks(best, N) <= processors
    return fitted(best, spec, places=1) if alone else two


def recipe(spec: Fp8Spec, config: NarrowFp8Config) -> Recipe:
    """What to compile. The result goes out element by element, whatever its strides allow."""
    spec = replace(spec, store="elements")
    return Recipe("tkq.gemm.fp8_narrow:build", (spec, config.check(spec)))
