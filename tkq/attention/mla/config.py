"""How the MLA kernel goes about it."""
from dataclasses import dataclass


@dataclass(frozen=True)
class MlaConfig:
    """keys: of a tile. registers: of a thread of the producers, of the scores, and of each half of the values. deep:
    tiles of the left half, of which the scores are ahead. multicast: blocks of a cluster, for which TMA loads each
    tile; 0: cp.async does, from pages of any size. pdl: the launch lies under the end of the kernel before."""

    keys: int = 64
    registers: tuple[int, int, int] = (32, 160, 160)
    deep: int = 3
    multicast: int = 0
    pdl: bool = True

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return max(self.multicast, 1)

    @property
    def rows_per_warp(self) -> int:
        """Rows of a tile that each of the four producer warps loads."""
        return self.keys // 4
