"""The shape of the 16-bit GEMM's kernel with tiles of 256 x 192: what its code depends on. Pure Python, no torch, no
DSL."""
from __future__ import annotations

from dataclasses import dataclass

from .fp8_config import Fp8Config
from .spec import BYTES, GemmSpec

M, N, STEP = 256, 192, 64  # of a block's tile; of K in a stage, a swizzle of 128 bytes


@dataclass(frozen=True)
class SixteenBits:
    """What ``Fp8Gemm`` asks a spec, of 16-bit operands without scales."""

    a: str
    b: str
    out: str
    scales = "none"
    promote = per_step = False
    bias = activation = None
    store = "tma"


@dataclass(frozen=True)
class WideConfig:
    """One kernel's shape. across: the two blocks of a cluster lie side by side and share A's tiles, or one above the
    other and share B's. group: columns of tiles to a band of the tile order. stages: of a and b in shared memory."""

    across: bool = True
    group: int = 8
    stages: int = 3
    cluster: int = 2

    m, n, consumers = M, N, 2

    @property
    def shape(self) -> Fp8Config:
        return Fp8Config(m=M, n=N, stages=self.stages, cluster=self.cluster, across=self.across, group=self.group,
                         panel_bytes=64, lead=1, lag=0)

    @property
    def name(self) -> str:
        return f"{M}x{N}_{'across' if self.across else 'cluster'}{self.cluster}"

    def shared_bytes(self, spec: GemmSpec) -> int:
        return self.shape.shared_bytes(sixteen(spec))

    def blocks(self, rows: int, cols: int, processors: int) -> int:
        """How many to launch for a result of so many: as ``plan.even_blocks``."""
        from .plan import even_blocks

        down, right = (1, self.cluster) if self.across else (self.cluster, 1)
        return even_blocks(-(-rows // (M * down)) * -(-cols // (N * right)), processors, self.cluster)

    def check(self, spec: GemmSpec) -> WideConfig:
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming what does not fit.
        """
        if not takes(spec):
            raise ValueError(f"gemm: spec does not fit in {self} for {spec}")
        self.shape.check(sixteen(spec))
        return self


def takes(spec: GemmSpec) -> bool:
    """Is there such a kernel: two accumulators of 64 x 192 leave no registers for an epilogue?"""
    return (spec.load == spec.store == "tma" and spec.epilogue.plain and not (spec.batch or spec.accumulate)
            and BYTES[spec.out] == 2)


def sixteen(spec: GemmSpec) -> SixteenBits:
    return SixteenBits(spec.dtype, spec.dtype, spec.out)
