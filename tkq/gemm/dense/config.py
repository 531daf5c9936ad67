"""The shape of a 16-bit GEMM's kernel: what its code depends on. Which one a problem gets says ``plan``. Pure Python,
no torch, no DSL."""
from dataclasses import dataclass

from .spec import BYTES, GemmSpec

SHARED_BYTES = 231424  # of a block, as far as 227 KB less the system's 1 KB
STEP = 64  # of K in a stage: a swizzle of 128 bytes
STORE_ROW_BYTES = 128  # of a row of C in shared memory: one swizzle
BUFFERS = 2  # epilogue subtiles in shared memory, for each consumer


@dataclass(frozen=True)
class Config:
    """One kernel's shape; bench/tune/gemm.py times the alternatives.

    m, n: a block's tile of C, 64 rows to each warpgroup that multiplies. stages: of a and b in shared memory. cluster:
    blocks one above the other, which share B's tiles. raster_group: columns of tiles to a band of the tile order.
    hold_in_registers: a tile's result waits in registers, in 16 bits, and is stored while the next tile's first
    products run. overlap_epilogue: one store (an epilogue subtile) under each of the next tile's first steps, not all
    under the first one; 2 and 4: a half and a quarter of a subtile, with defer_activation. defer_activation: what waits
    is the product, and the activation is computed when it is stored: the product is rounded before and after it, as in
    two calls. pdl: the launch lies under the end of the kernel before. wave_sync: a block loads no more than
    1 / wave_sync of a tile before all blocks have begun a tile of that wave; 0: it does not wait for others.
    """

    m: int = 128
    n: int = 256
    stages: int = 4
    cluster: int = 2
    raster_group: int = 8
    hold_in_registers: bool = True
    overlap_epilogue: int = 0
    defer_activation: bool = False
    pdl: bool = False
    wave_sync: int = 0

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.m // 64

    @property
    def name(self) -> str:
        cluster = f"_cluster{self.cluster}" if self.cluster > 1 else ""
        return f"{self.m}x{self.n}{cluster}" + "_wave_sync" * (self.wave_sync > 0)

    def shared_bytes(self, spec: GemmSpec) -> int:
        """Shared memory of a block: stages, store buffers, semaphores, and what alignment may cost."""
        stage = (self.m + self.n) * STEP * BYTES[spec.dtype]
        buffers = self.consumers * BUFFERS * 64 * STORE_ROW_BYTES if has_store_buffers(spec) else 0
        return self.stages * stage + buffers + 1024

    def check(self, spec: GemmSpec) -> "Config":
        """Self, if the kernel can take it for this spec.

        Raises:
            ValueError: naming the field that does not fit.
        """
        rules = {
            "m": self.m in (64, 128),
            "n": self.n == 128 or (self.n == 256 and not wide_residual(spec)),
            "stages": self.stages > 1,
            "cluster": self.cluster in (1, 2),
            "raster_group": self.raster_group > 0,
            "hold_in_registers": not self.hold_in_registers or can_hold_in_registers(spec),
            "overlap_epilogue": self.overlap_epilogue in (0, 1, 2, 4)
            and (self.hold_in_registers or not self.overlap_epilogue)
            and (self.defer_activation or self.overlap_epilogue < 2),
            "defer_activation": not self.defer_activation or (self.hold_in_registers and spec.epilogue.curved),
            "wave_sync": not self.wave_sync or (self.wave_sync > 0 and can_wave_sync(spec)),
        }
        for name, holds in rules.items():
            if not holds:
                raise ValueError(f"gemm: {name} does not fit in {self} for {spec}")
        if self.shared_bytes(spec) > SHARED_BYTES:
            raise ValueError(f"gemm: {self} takes {self.shared_bytes(spec)} bytes of shared memory for {spec}, "
                             f"allowed are {SHARED_BYTES}")
        return self


def wide_residual(spec: GemmSpec) -> bool:
    """Is there a c of fp32? Beside an accumulator of 128 numbers a thread, those of it do not stay in registers."""
    return spec.epilogue.residual and spec.out == "fp32"


def can_hold_in_registers(spec: GemmSpec) -> bool:
    """May a result wait in registers: do 16 bits suffice, and for c, which waits there before? Rows that TMA does not
    write are quicker at once."""
    pairs = not spec.epilogue.residual or spec.epilogue.residual_pairs
    return spec.out != "fp32" and spec.store == "tma" and pairs


def can_wave_sync(spec: GemmSpec) -> bool:
    """May blocks wait for each other in each wave? The counter takes a bias's place."""
    return spec.load == "tma" and not (spec.epilogue.bias or spec.epilogue.gate)


def has_store_buffers(spec: GemmSpec) -> bool:
    """Does a result leave by way of shared memory?"""
    return spec.store != "direct"
