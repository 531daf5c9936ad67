"""Which kernel for few rows of A, M up to 128, where reading B is all that takes time. Pure Python, no torch, no DSL.
"""
from __future__ import annotations

from dataclasses import replace

from ..runtime.recipe import Recipe
from .epilogue import sources
from .narrow_config import SLOT_BYTES, STEP, WIDTHS, NarrowConfig
from .spec import BYTES, GemmSpec

MOST_ROWS = WIDTHS[-1]
FEWEST_STEPS = 4  # of K that are worth a block of their own
MOST_STAGES = 16

# Measured on an H100 (docs/attempts.md):
HBM = 3000  # bytes a nanosecond
PROCESSOR = 55  # bytes a nanosecond that one processor reads, of those that all read from L2
ADD_UP = {1: 0, 2: 1200, 4: 4000, 8: 6000}  # nanoseconds, where so many blocks share K


def fitted(config: NarrowConfig, spec: GemmSpec) -> NarrowConfig:
    """The configuration with as many stages as let two blocks share a processor, and at least two."""
    room = SLOT_BYTES - replace(config, stages=0).shared_bytes(spec)
    stages = max(2, min(MOST_STAGES, room // config.stage_bytes(spec)))
    return replace(config, stages=stages).check(spec)


def parts_of_k(K: int, split: int):
    """(first, end) of each block's steps of K: as even as whole steps are, none empty where there are as many steps."""
    steps = -(-K // STEP)
    return [(steps * i // split, steps * (i + 1) // split) for i in range(split)]


def nanoseconds(config: NarrowConfig, spec: GemmSpec, N: int, K: int, processors: int) -> float:
    """What a product should take: all of B from HBM, or what the busiest processor reads of A and B, whichever is
    longer, and what the blocks of a cluster need to add up."""
    blocks = -(-N // (config.rows // config.parts)) * config.split
    line = K * BYTES[spec.dtype] / config.split  # bytes of a row in a block
    busiest = -(-blocks // processors) * (config.m + config.rows) * line
    return max(blocks * config.rows * line / HBM, busiest / PROCESSOR) + ADD_UP[config.split]


def plan(spec: GemmSpec, M: int, N: int, K: int, processors: int) -> NarrowConfig:
    """The configuration that should take least time; of equals the one that splits K least, of fewer columns."""
    m = next(width for width in WIDTHS if width >= M)
    parts, steps = 2 if spec.epilogue.gate else 1, -(-K // STEP)
    splits = [s for s in ADD_UP if s == 1 or steps // s >= FEWEST_STEPS]
    configs = [fitted(NarrowConfig(m, rows, split, parts=parts), spec)
               for split in splits for rows in ((64, 128) if parts == 1 else (128,))]
    fit = [config for config in configs if config.shared_bytes(spec) <= SLOT_BYTES]
    return min(fit, key=lambda config: nanoseconds(config, spec, N, K, processors))


def recipe(spec: GemmSpec, config: NarrowConfig) -> Recipe:
    """What to compile. The result goes out element by element, whatever its strides allow."""
    spec = replace(spec, store="elements", epilogue=replace(spec.epilogue, residual_pairs=False))
    return Recipe("tkq.gemm.narrow:build", (spec, config.check(spec)), sources=sources(spec.epilogue))
