"""Which kernel for few rows of A, M up to 128, where reading B is all that takes time. Pure Python, no torch, no DSL.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from ..runtime.recipe import Recipe
from .epilogue import sources
from .spec import BYTES, GemmSpec

MOST_ROWS = 128
WIDTHS = (16, 32, 64, 128)  # of A's rows, padded
STEP = 64  # of K in a stage
SLOT_BYTES = (228 * 1024 // 2) - 1024  # of a block's shared memory, where two share a processor
FEWEST_STEPS = 4  # of K that are worth a block of their own
MOST_STAGES = 16


@dataclass(frozen=True)
class NarrowConfig:
    """One kernel's shape; bench/tune_gemm.py times the alternatives.

    m: rows of A, padded: wgmma's N. rows: of B's transpose, a block's, 64 to each accumulator. split: blocks of a
    cluster that share K. stages: of both in shared memory. parts: accumulators of a warpgroup: two where gated, for the
    gate and for up.
    """

    m: int = 16
    rows: int = 64
    split: int = 2
    stages: int = 10
    parts: int = 1

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.rows // 64 // self.parts

    @property
    def reducers(self) -> int:
        """Blocks of a cluster that add up: each has at least 8 rows of A."""
        return min(self.split, self.m // 8)

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 32

    @property
    def name(self) -> str:
        return f"narrow{self.m}x{self.rows}_split{self.split}"

    @property
    def exchange_bytes(self) -> int:
        """What the other blocks send to one that adds up."""
        return (self.split - 1) * self.rows * (self.m // self.reducers) * 4

    def stage_bytes(self, spec: GemmSpec) -> int:
        return (self.m + self.rows) * STEP * BYTES[spec.dtype]

    def shared_bytes(self, spec: GemmSpec) -> int:
        """Shared memory of a block: stages, what is exchanged, semaphores, and what alignment may cost."""
        return self.stages * self.stage_bytes(spec) + self.exchange_bytes + 1024

    def check(self, spec: GemmSpec) -> NarrowConfig:
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming what does not fit.
        """
        rules = {
            "m": self.m in WIDTHS,
            "rows": self.rows in (64, 128) and self.consumers > 0,
            "parts": self.parts == (2 if spec.epilogue.gate else 1),
            "split": self.split in (1, 2, 4, 8),
            "stages": self.stages > 1,
            "spec": takes(spec),
        }
        for name, kept in rules.items():
            if not kept:
                raise ValueError(f"gemm: {name} does not fit in {self} for {spec}")
        if self.shared_bytes(spec) > 2 * SLOT_BYTES:
            raise ValueError(f"gemm: {self} takes {self.shared_bytes(spec)} bytes of shared memory for {spec}, "
                             f"allowed are {2 * SLOT_BYTES}")
        return self


def takes(spec: GemmSpec) -> bool:
    """Is there a narrow kernel for this spec, whatever its way out? A by rows, no batch, nothing added to."""
    return spec.load == "tma" and spec.a_major == "k" and not (spec.batch or spec.accumulate)


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
