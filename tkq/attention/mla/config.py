"""How the MLA kernel goes about it."""
from dataclasses import dataclass


@dataclass(frozen=True)
class MlaConfig:
    """keys: of a tile. registers: of a thread of the producers, of the scores, and of each half of the values.
    multicast: blocks of a cluster, for which TMA loads each tile; 0: cp.async does, from pages of any size. pdl: the
    launch lies under the end of the kernel before.

    rise: powers of two by which a row's largest score may exceed the one that its exponentials are relative to, before
    that one follows and the sums are rescaled. Results are the same but for rounding: the row's log-sum-exp and its
    weights hold for any number that is subtracted. Exponentials are then at most 2^rise, below the largest fp16 up to
    15, and where the largest score lies between them, at least 1, so that no more of them vanish; n keys sum up to
    n * 2^rise at most in fp32, below 2^47 of its 2^128 for 2^31 keys, and values to that times the largest of them. The
    first block's largest score is taken whatever it is, as all but -inf exceeds -inf.

    scores_in_flight: groups of the scores' products, the last ones, that the left half of the values does not wait for.

    branch_free: between a block's scores and P nothing is waited for that could be there before, and no thread
    branches.

    lazy_row_max: whether a row's largest score rises by so much is asked of each thread's own scores, and a row's
    threads meet only where one of them says so.

    partials_in_fragments: partial results lie in the order of the accumulators' registers, so that a thread writes 16
    bytes at a time: of 16 columns, two and the two 8 behind them."""

    keys: int = 64
    registers: tuple[int, int, int] = (32, 160, 160)
    multicast: int = 0
    pdl: bool = True
    rise: int = 0
    scores_in_flight: int = 0
    branch_free: bool = False
    lazy_row_max: bool = False
    partials_in_fragments: bool = False

    def __post_init__(self):
        if not 0 <= self.rise <= 15:
            raise ValueError(f"MlaConfig: rise is {self.rise}, allowed are 0 to 15, whose exponentials fp16 holds")
        if self.lazy_row_max and not self.rise:
            raise ValueError("MlaConfig: lazy_row_max is True, rise is 0; allowed are 1 to 15")

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return max(self.multicast, 1)

    @property
    def rows_per_warp(self) -> int:
        """Rows of a tile that each of the four producer warps loads."""
        return self.keys // 4
