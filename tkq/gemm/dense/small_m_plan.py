"""Which small-M kernel, M up to 128, where reading B is all that takes time. Pure Python, no torch, no DSL.
"""
from __future__ import annotations

from dataclasses import replace

from ...runtime.compile.recipe import Recipe
from ..epilogue.spec import sources
from .small_m_config import SLOT_BYTES, STEP, WIDTHS, SmallMConfig
from .spec import BYTES, GemmSpec

MOST_M = WIDTHS[-1]
FEWEST_STEPS = 4  # of K that are worth a block of their own
MOST_STAGES = 16

# Measured on an H100 (docs/attempts.md):
HBM = 3000  # bytes a nanosecond
SM_READ = 80  # bytes a nanosecond that one SM reads of A and B
IN_FLIGHT = 48 * 1024  # bytes of B that an SM waits for at a time, at least
ADD_UP = {16: (0, 1600, 2700, 3000), 32: (0, 1600, 3300, 4400), 64: (0, 1700, 4600, 7100),
          128: (0, 2000, 23000, 26000)}  # nanoseconds, by rows of A: where 1, 2, 4, 8 blocks share K
SPLITS = (1, 2, 4, 8)


def fit_to_spec(config: SmallMConfig, spec: GemmSpec, places: int = 2) -> SmallMConfig:
    """The configuration with as many stages as let ``places`` blocks share an SM, and at least two."""
    room = 2 // places * SLOT_BYTES - replace(config, stages=0).shared_bytes(spec)
    stages = max(2, min(MOST_STAGES, room // config.stage_bytes(spec)))
    return replace(config, stages=stages).check(spec)


def blocks(config: SmallMConfig, N: int) -> int:
    """How many there are."""
    return -(-N // config.rows) * config.split


def for_problem(config: SmallMConfig, spec: GemmSpec, N: int, num_sms: int) -> SmallMConfig:
    """``fit_to_spec``: a block that has its SM for itself takes all shared memory if it would wait for too
    little."""
    two = fit_to_spec(config, spec)
    little = two.stages * config.rows * STEP * BYTES[spec.dtype] < IN_FLIGHT
    return fit_to_spec(config, spec, places=1) if little and blocks(config, N) <= num_sms else two


def parts_of_k(K: int, split: int):
    """(first, end) of each block's steps of K: as even as whole steps are, none empty where there are as many steps."""
    steps = -(-K // STEP)
    return [(steps * i // split, steps * (i + 1) // split) for i in range(split)]


def nanoseconds(config: SmallMConfig, spec: GemmSpec, N: int, K: int, num_sms: int) -> float:
    """What a product should take: all of B from HBM, or what the busiest SM reads of A and B, whichever is
    longer, and what the blocks of a cluster need to add up."""
    count = blocks(config, N)
    line = K * BYTES[spec.dtype] / config.split  # bytes of a row in a block
    busiest = -(-count // num_sms) * (config.m + config.rows) * line
    return max(count * config.rows * line / HBM, busiest / SM_READ) + ADD_UP[config.m][SPLITS.index(config.split)]


def plan(spec: GemmSpec, M: int, N: int, K: int, num_sms: int) -> SmallMConfig:
    """The configuration that should take least time; of equals the one that splits K least, of fewer columns."""
    m = next(width for width in WIDTHS if width >= M)
    parts, steps = 2 if spec.epilogue.gate else 1, -(-K // STEP)
    allowed = [s for s in SPLITS if s == 1 or steps // s >= FEWEST_STEPS]
    configs = [SmallMConfig(m, rows, split, parts=parts)
               for split in allowed for rows in ((64, 128) if parts == 1 else (128,))]
    best = min(configs, key=lambda config: nanoseconds(config, spec, N, K, num_sms))
    return for_problem(best, spec, N, num_sms)


def recipe(spec: GemmSpec, config: SmallMConfig) -> Recipe:
    """What to compile. The result goes out element by element, whatever its strides allow."""
    spec = replace(spec, store="direct", epilogue=replace(spec.epilogue, residual_pairs=False))
    return Recipe("tkq.gemm.dense.small_m_kernel:SmallMGemm", (spec, config.check(spec)),
                  sources=sources(spec.epilogue))
