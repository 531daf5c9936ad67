"""How the decode kernel goes about it."""
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """keys: rows of a K or V tile. stages: tiles of K, and as many of V, in shared memory. registers: of a thread of
    the producers and of the consumers. blocks: of threads on an SM. pdl: the launch lies under the end of the kernel
    before. q_in_registers: of the consumers, not in shared memory."""

    keys: int = 128
    stages: int = 3
    registers: tuple[int, int] = (120, 240)
    blocks: int = 1
    pdl: bool = True
    q_in_registers: bool = False

    @property
    def rows_per_warp(self) -> int:
        """Rows of a tile that each of the four producer warps loads."""
        return self.keys // 4


@dataclass(frozen=True)
class DirectConfig:
    """Of few queries over a float8 cache, see `direct`. step: keys that each of ``warps`` warps reads at a time, 16 or
    32. keys: of a block, the plan's unit. blocks, pdl: as above."""

    step: int = 32
    warps: int = 4
    keys: int = 64
    blocks: int = 2
    pdl: bool = True
