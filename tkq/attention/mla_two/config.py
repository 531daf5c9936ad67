"""How the MLA kernel goes about it."""
from dataclasses import dataclass


@dataclass(frozen=True)
class MlaConfig:
    """keys: of a tile. stages: tiles in shared memory. registers: of a thread of the producers, of the warpgroup that
    has the scores, and of the other. pdl: the launch lies under the end of the kernel before. lag: the right half of a block's values waits for the scores of the next block, so that it lies
    under their softmax."""

    keys: int = 64
    stages: int = 2
    registers: tuple[int, int, int] = (40, 240, 224)
    pdl: bool = True
    lag: bool = False

    @property
    def rows_per_warp(self) -> int:
        """Rows of a tile that each of the four producer warps loads."""
        return self.keys // 4
