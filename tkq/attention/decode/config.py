"""How the decode kernel goes about it."""
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """keys: rows of a K or V tile. stages: tiles of K, and as many of V, in shared memory. registers: of a thread of
    the producers and of the consumers. blocks: of threads on an SM. pdl: the launch lies under the end of the kernel
    before. q_in_registers: of the consumers, not in shared memory. prefetch: of float8 caches a block
    of keys is brought into L2 before it is asked for.

    step: keys that each of ``warps`` warps reads for itself, 16 or 32, see `direct`; 0: producers and a consumer."""

    keys: int = 128
    stages: int = 3
    registers: tuple[int, int] = (120, 240)
    blocks: int = 1
    pdl: bool = True
    q_in_registers: bool = False
    prefetch: bool = False
    step: int = 0
    warps: int = 8

    @property
    def rows_per_warp(self) -> int:
        """Rows of a tile that each of the four producer warps loads."""
        return self.keys // 4
