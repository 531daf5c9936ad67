"""From gradients of features to gradients of what they are made of (see `features` for where they lie)."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.based.features import Row
from tkq.linear_attention.based.layout import FIRST
from tkq.tile.dtypes import type_name

HELD = 12  # columns of a row that a thread's features are made of


def of_features(first: tk.RegTile, second: tk.RegTile, x: Row, dtype) -> list:
    """[[4 numbers] of each of this thread's two rows]: the gradients of columns 4 l + 0 .. 3 of x, l the lane's number
    of four. first, second: gradients of the features, 64 x 160. Whole warps."""
    lane = tk.lane_id()
    found = []
    for r in range(2):
        y = [_wide(x.words[r][m // 2], m % 2, dtype) for m in range(HELD)]
        sums = [Float32(0.0) for _ in range(HELD)]
        for block, e in ((block, e) for block in range(20) for e in range(2)):
            d = first.rows_view[r, 2 * block + e] if block < FIRST // 8 else second.rows_view[
                r, 2 * (block - FIRST // 8) + e]
            if block < 2:
                sums[2 * block + e] = sums[2 * block + e] + d
            elif block == 3:
                for upper in range(2):
                    mine = cutlass.select_(x.upper, d if upper else Float32(0.0), Float32(0.0) if upper else d)
                    _product(sums, mine, y, 2 * upper + e, 2 * upper + 8 + e)
            elif block > 3:
                shift, half = divmod(block - 4, 2)
                _product(sums, d, y, 2 * half + e, 2 * half + shift + e)
        found.append([_of_quad(sums, e, lane) for e in range(4)])
    return found


def _product(sums, d, y, i, j):
    """Of y[i] y[j]; of a square both halves."""
    sums[i] = cute.math.fma(d, y[j], sums[i])
    sums[j] = cute.math.fma(d, y[i], sums[j])


def _of_quad(sums, e, lane):
    """Column 4 l + e: the m-th lane below has it as its column 4 m + e."""
    whole = sums[e]
    for m in (1, 2):
        source = (lane & Int32(28)) | ((lane + (4 - m)) & Int32(3))
        whole = whole + cute.arch.shuffle_sync(sums[4 * m + e], source)
    return whole


def _wide(word, half, dtype):
    """One of two numbers of 16 bits."""
    if type_name(dtype) == "bf16":
        return (word & Int32(-65536) if half else word << Int32(16)).bitcast(Float32)
    two = cute.make_rmem_tensor((2,), dtype)
    cute.recast_tensor(two, Int32)[0] = word
    return Float32(two[half])
