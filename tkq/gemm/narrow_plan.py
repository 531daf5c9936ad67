"""Which kernel for few rows of A, M up to 128, where reading B is all that takes time. Pure Python, no torch, no DSL.
"""
from __future__ import annotations

from dataclasses import replace

from ..runtime.recipe import Recipe
from .epilogue import sources
from .narrow_config import SLOT_BYTES, STEP, WIDTHS, NarrowConfig
from .spec import GemmSpec

MOST_ROWS = WIDTHS[-1]
FEWEST_STEPS = 4  # of K that are worth a block of their own
MOST_STAGES = 16


def fitted(config: NarrowConfig, spec: GemmSpec) -> NarrowConfig:
    """The configuration with as many stages as let two blocks share a processor, and at least two."""
    room = SLOT_BYTES - replace(config, stages=0).shared_bytes(spec)
    stages = max(2, min(MOST_STAGES, room // config.stage_bytes(spec)))
    return replace(config, stages=stages).check(spec)


def parts_of_k(K: int, split: int):
    """(first, end) of each block's steps of K: as even as whole steps are, none empty where there are as many steps."""
    steps = -(-K // STEP)
    return [(steps * i // split, steps * (i + 1) // split) for i in range(split)]


def fill(config: NarrowConfig, N: int, processors: int) -> float:
    """What part of the processors' places, two each, is taken, over all rounds of blocks."""
    blocks, places = -(-N // config.rows) * config.split, 2 * processors
    return blocks / (-(-blocks // places) * places)


def plan(spec: GemmSpec, M: int, N: int, K: int, processors: int) -> NarrowConfig:
    """The configuration that fills the processors best; of equals the one that splits K least.

    Each block reads all rows of A for its part of K: where they are many, B's rows are 128 to a block, and half as much
    comes from L2."""
    m = next(width for width in WIDTHS if width >= M)
    parts = 2 if spec.epilogue.gate else 1
    rows = 64 * parts if m <= 32 else 128
    steps = -(-K // STEP)
    allowed = [s for s in (1, 2, 4, 8) if s == 1 or steps // s >= FEWEST_STEPS]
    configs = [fitted(NarrowConfig(m, rows, split, parts=parts), spec) for split in allowed]
    pairs = [config for config in configs if config.shared_bytes(spec) <= SLOT_BYTES]
    return max(pairs, key=lambda config: (round(fill(config, N, processors), 2), -config.split))


def recipe(spec: GemmSpec, config: NarrowConfig) -> Recipe:
    """What to compile. The result goes out element by element, whatever its strides allow."""
    spec = replace(spec, store="elements", epilogue=replace(spec.epilogue, residual_pairs=False))
    return Recipe("tkq.gemm.narrow:build", (spec, config.check(spec)), sources=sources(spec.epilogue))
