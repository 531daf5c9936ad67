"""Where features lie (see `features`), in plain Python."""
from __future__ import annotations

BLOCKS = 20  # of 8 columns
COLUMNS = 8 * BLOCKS
FIRST = 64  # columns of the first of the two tiles that features lie in
ONE = 16  # the column that is 1
MOMENTS = 32  # columns of the moments: multiples of 16 that have the linear features and the one
THREADS = 128  # of a warpgroup
HELD_STATE = 64 * COLUMNS // THREADS  # numbers of a thread's state, of its moments
HELD_MOMENTS = 64 * MOMENTS // THREADS


def blocks() -> list:
    """What each block is made of."""
    return ["linear"] * 2 + ["one", "pair"] + ["square"] * 2 + ["pair"] * 14


def columns() -> list:
    """Of each column which of x are multiplied: (), (i,) or (i, j); None: it is 0."""
    return [_column(block, lane, e) for block in range(BLOCKS) for lane in range(4) for e in range(2)]


def _column(block, lane, e):
    def turned(*places):
        return tuple((4 * lane + m + e) % 16 for m in places)

    if block < 2:
        return turned(2 * block)
    if block == 2:
        return () if (lane, e) == (0, 0) else None
    if block == 3:
        return turned(2, 10) if lane >= 2 else turned(0, 8)
    shift, half = divmod(block - 4, 2)
    return turned(2 * half, 2 * half + shift)
