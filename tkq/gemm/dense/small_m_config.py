"""The config of the small-M kernel: what its code depends on. Which one a problem gets says ``small_m_plan``.
Pure Python, no torch, no DSL."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .spec import BYTES, GemmSpec

WIDTHS = (16, 32, 64, 128)  # of A's rows, padded
STEP = 64  # of K in a stage
SLOT_BYTES = (228 * 1024 // 2) - 1024  # of a block's shared memory, where two share an SM


@dataclass(frozen=True)
class SmallMConfig:
    """One kernel's shape; bench/tune/gemm.py times the alternatives.

    m: rows of A, padded: wgmma's N. rows: of B's transpose, a block's, 64 to each accumulator. split: blocks of a
    cluster that share K. stages: of both in shared memory. parts: accumulators of a warpgroup: two where gated, for the
    gate and for up.
    """

    op: ClassVar[str] = "gemm"
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
    def tiled(self) -> bool:
        """Does it take more than m rows of A?"""
        return False

    @property
    def reducers(self) -> int:
        """Blocks of a cluster that add up: each has at least 8 rows of A."""
        return min(self.split, self.m // 8)

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 32

    @property
    def name(self) -> str:
        return f"small_m{self.m}x{self.rows}_split{self.split}"

    @property
    def exchange_bytes(self) -> int:
        """What the other blocks send to one that adds up."""
        return (self.split - 1) * self.rows * (self.m // self.reducers) * 4

    def stage_bytes(self, spec: GemmSpec) -> int:
        return (self.m + self.rows) * STEP * BYTES[spec.dtype]

    def shared_bytes(self, spec: GemmSpec) -> int:
        """Shared memory of a block: stages, what is exchanged, semaphores, and what alignment may cost."""
        return self.stages * self.stage_bytes(spec) + self.exchange_bytes + 1024

    def rules(self, spec: GemmSpec) -> dict:
        """What must hold, by the field that it is about."""
        return {
            "m": self.m in WIDTHS,
            "rows": self.rows in (64, 128) and self.consumers > 0,
            "parts": self.parts == (2 if spec.epilogue.gate else 1),
            "split": self.split in (1, 2, 4, 8),
            "stages": self.stages > 1,
            "spec": takes(spec),
        }

    def check(self, spec) -> SmallMConfig:
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming what does not fit.
        """
        for name, holds in self.rules(spec).items():
            if not holds:
                raise ValueError(f"{self.op}: {name} does not fit in {self} for {spec}")
        if self.shared_bytes(spec) > 2 * SLOT_BYTES:
            raise ValueError(f"{self.op}: {self} takes {self.shared_bytes(spec)} bytes of shared memory for {spec}, "
                             f"allowed are {2 * SLOT_BYTES}")
        return self


def takes(spec: GemmSpec) -> bool:
    """Is there a small-M kernel for this spec, whatever its store? A by rows, no batch, nothing added to."""
    return spec.load == "tma" and spec.a_major == "k" and not (spec.batch or spec.accumulate)
