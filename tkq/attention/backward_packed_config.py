"""How the kernels of packed sequences' backward are built, where they do more in the background: pure Python."""
from dataclasses import dataclass

from tkq.attention.backward_config import BackwardConfig


@dataclass(frozen=True)
class PackedConfig(BackwardConfig):
    """known: the kernel before makes the statistics of so many tiles for each multiprocessor, those that are worked on
    first; the background makes the others', when it zeroes their accumulators. apart: without masks, each block begins
    with another tile. ahead: the next task's K and V are brought into L2 while the last tiles of this one are worked
    on. sleep: nanoseconds between two looks of the background at what it waits for. rooms: parts of dQ that are on
    their way to the accumulator at once; they must divide a tile's. two_keys: the next task's K
    has memory beside this one's."""

    known: int = 4
    apart: bool = False
    ahead: bool = False
    sleep: int = 0
    rooms: int = 1
    two_keys: bool = False

    def shared_bytes(self, width: int) -> int:
        keys = 2 * self.block * width if self.two_keys else 0
        return super().shared_bytes(width) + (self.rooms - 1) * 64 * self.dq_cols * 4 + keys

    def check(self, width: int) -> "PackedConfig":
        super().check(width)
        if not self.background or self.known < 1 or width > 128:
            raise ValueError(f"{self}: it is for background, up to width 128; known must be 1 or more")
        rows, cols = self.dq_parts(width)
        if self.dq_add != "bulk" or self.rooms < 1 or rows * cols % self.rooms:
            raise ValueError(f"{self}: dq_add must be bulk, and rooms divide a tile's {rows * cols} parts of dQ")
        return self
