"""Sums of a register tile's columns: over the rows of a warp, each lane then has two columns of 64."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk

COLUMNS = 64


def warp_columns(x: tk.RegTile, weight: tk.RowVec) -> list:
    """[sum of weight[i] x[i, c] over the warp's 16 rows, for c = column and column + 1], column as `lane_column` says.
    x: 64 columns of fp32. Whole warps."""
    lane, view = tk.lane_id(), x.rows_view
    sums = [[cute.math.fma(view[1, 2 * block + e], weight.tensor[1], view[0, 2 * block + e] * weight.tensor[0])
             for e in range(2)] for block in range(COLUMNS // 8)]
    for offset in (16, 8, 4):  # lanes that differ there exchange halves: what is left of the blocks is theirs
        upper, half = lane & offset != 0, len(sums) // 2
        sums = [[_exchange(sums[block][e], sums[block + half][e], upper, offset) for e in range(2)]
                for block in range(half)]
    return sums[0]


def _exchange(low, high, upper, offset):
    mine, others = (Float32(cutlass.select_(upper, *pair)) for pair in ((high, low), (low, high)))
    return mine + cute.arch.shuffle_sync_bfly(others, offset=offset)


def lane_column():
    """The first of the two columns that a lane has of `warp_columns`."""
    lane = tk.lane_id()
    return 8 * (lane // 4) + 2 * (lane % 4)
