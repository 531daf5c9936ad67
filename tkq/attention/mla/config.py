"""How the MLA kernel goes about it."""
from dataclasses import dataclass


@dataclass(frozen=True)
class MlaConfig:
    """keys: of a tile. registers: of a thread of the producers, of the scores, and of each half of the values. deep:
    tiles of the left half, of which the scores are ahead. multicast: blocks of a cluster, for which TMA loads each
    tile; 0: cp.async does, from pages of any size. pdl: the launch lies under the end of the kernel before.

    ahead: which block of keys behind the one that is loaded is brought into L2; 0: none. pieces: of a half that are
    awaited and released by themselves, 1 or with TMA 2. rise: powers of two by which a row's largest score may grow
    before its sums are rescaled."""

    keys: int = 64
    registers: tuple[int, int, int] = (32, 160, 160)
    deep: int = 3
    multicast: int = 0
    pdl: bool = True
    ahead: int = 0
    pieces: int = 1
    rise: int = 0

    def __post_init__(self):
        if self.pieces not in (1, 2):
            raise ValueError(f"MlaConfig: pieces is {self.pieces}, allowed are 1 and 2")
        if not self.multicast and self.pieces > 1:
            raise ValueError(f"MlaConfig: pieces is {self.pieces}, multicast is 0; allowed without TMA is 1")

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return max(self.multicast, 1)

    @property
    def rows_per_warp(self) -> int:
        """Rows of a tile that each of the four producer warps loads."""
        return self.keys // 4
