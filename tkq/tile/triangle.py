"""Elementwise maps of one half of a square tile: what tokens of a chunk give each other, causally.

Scope: the warpgroup's threads, as ``tkq.tile.maps``."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from .block import lane_id, warp_id
from .maps import _cvt2, check_narrow, element
from .register import first_col

_WARPS, _ROWS = 4, 64  # of a warpgroup; of a tile


def apply_triangle(dst, f, *operands, apart=0, upper=False):
    """dst[i, j] = f(a[i, j], ..) for j <= i - apart, and 0 for the others, as ``apply_narrow`` computes it; upper: for
    j >= i + apart.

    Each warp has code for its own 16 rows: what none of them has is not computed, and only in the 16 columns around
    the diagonal elements are compared. dst: a tile of bf16 or fp16, 64 x 64. apart: 0, or 1 without the diagonal.
    Operands: as of ``apply_narrow``. Whole warps call it. Causal weights of scores s, with sums of gates of rows and
    columns: ``apply_triangle(p, lambda s, i, j: s * exp2(i - j), s, rows, cols)``.

    Raises:
        TypeError: dst or an operand is of a type that ``apply_narrow`` refuses.
        ValueError: dst is not 64 x 64, an operand has another width, apart is neither 0 nor 1."""
    check_narrow("apply_triangle", (dst,), operands)
    if dst.cols != _ROWS:
        raise ValueError(f"apply_triangle: dst is {dst}, allowed are tiles of 64 x 64")
    if apart not in (0, 1):
        raise ValueError(f"apply_triangle: apart is {apart}, allowed are 0 and 1")
    _by_warp(dst, lambda i: f(*[element(x, i) for x in operands]), (apart, upper))


@cute.jit
def _by_warp(dst, f: Constexpr, half: Constexpr):
    for warp in cutlass.range_constexpr(_WARPS):
        if warp_id() % _WARPS == warp:
            _rows_of_warp(dst, f, half, warp)


def _rows_of_warp(dst, f, half, warp):
    """Of its two rows a thread has elements 0 1 4 5 8 9 .. and 2 3 6 7 ..; each pair is one of eight columns."""
    pairs, (apart, upper) = cute.recast_tensor(dst.tensor, Int32), half
    behind = lane_id() // 4 - first_col()  # how far the row is behind the pair's first column, where both are eight
    for i in range(dst.cols // 4):
        row, block = 2 * warp + i % 2, i // 2
        if block != row and (block < row) == upper:
            pairs[i] = Int32(0)
            continue
        two = [f(2 * i + e) for e in range(2)]
        if block == row:
            seen = [behind + apart <= e if upper else behind - apart >= e for e in range(2)]
            two = [cutlass.select_(there, x, type(x)(0.0)) for there, x in zip(seen, two, strict=True)]
        pairs[i] = _cvt2(*two, dst.dtype)
