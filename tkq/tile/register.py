"""Register tiles and vectors: a warpgroup's 64 rows, in the layout in which wgmma leaves and takes them.

A thread holds two rows of a tile, 8 apart; element ``i`` is in row ``(i // 2) % 2`` of the two and in column
``8 * (i // 4) + i % 2`` past the thread's first. An fp32 accumulator and a 16-bit A operand hold the same elements in
the same order, which makes converting one to the other a matter of pairs. 8-bit A operands have another order (four
neighbours in a register): ``load`` makes them.
"""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float16, Float32, Int64, Numeric, Uint32, const_expr

from .block import lane_id, thread_in_warpgroup
from .dtypes import FP8, HALF, type_name

ROWS = 64  # of every register tile


@dataclass(frozen=True)
class RegTile:
    """64 x cols over a warpgroup. A handle: contents are written in place, so no tile is carried through a loop."""

    tensor: cute.Tensor
    cols: int
    dtype: Any

    def __str__(self):
        return f"64 x {self.cols} {type_name(self.dtype)} in registers"

    @property
    def rows_view(self):
        """(2, cols // 4): this thread's two rows. fp32 and 16 bits."""
        if self.dtype in FP8:
            raise TypeError(f"rows of a tile: it is {self}, allowed are fp32, bf16, fp16")
        return cute.make_tensor(self.tensor.iterator, cute.make_layout((2, (2, self.cols // 8)), stride=(2, (1, 4))))

    @property
    def acc_view(self):
        """The elements as a wgmma accumulator, whatever the dtype."""
        return cute.make_tensor(self.tensor.iterator, cute.make_layout(((2, 2, self.cols // 8), 1, 1)))


@dataclass(frozen=True)
class RowVec:
    """One fp32 value a row of a register tile: two per thread, the same in the four threads of a quad."""

    tensor: cute.Tensor

    def __str__(self):
        return "row vector"


@dataclass(frozen=True)
class ColVec:
    """One fp32 value a column of a register tile: cols / 4 per thread, the same down a column."""

    tensor: cute.Tensor
    cols: int

    def __str__(self):
        return f"column vector of {self.cols}"


def rt(cols, dtype=Float32) -> RegTile:
    """A register tile of 64 x cols, uninitialised. cols is known when compiled.

    fp32: cols a multiple of 8 up to 256; 16 bits: a multiple of 16; e4m3 and e5m2: a multiple of 32."""
    step = {Float32: 8, **dict.fromkeys(HALF, 16), **dict.fromkeys(FP8, 32)}.get(dtype)
    if step is None:
        raise TypeError(f"rt: dtype is {type_name(dtype)}, allowed are fp32, bf16, fp16, e4m3, e5m2")
    if cols % step or not 0 < cols <= 256:
        raise ValueError(f"rt: cols is {cols}, allowed for {type_name(dtype)} are multiples of {step} up to 256")
    shape = {32: ((2, 2, cols // 8), 1, 1), 16: ((2, 2, 2), 1, cols // 16), 8: ((4, 2, 2), 1, cols // 32)}[dtype.width]
    return RegTile(cute.make_rmem_tensor(shape, dtype), cols, dtype)


def rt_fl(cols) -> RegTile:
    """64 x cols fp32: what wgmma accumulates into."""
    return rt(cols, Float32)


def rt_bf(cols) -> RegTile:
    """64 x cols bf16: an A operand."""
    return rt(cols, BFloat16)


def rt_hf(cols) -> RegTile:
    """64 x cols fp16: an A operand."""
    return rt(cols, Float16)


def rv() -> RowVec:
    """A row vector, uninitialised."""
    return RowVec(cute.make_rmem_tensor((2,), Float32))


def cv(cols) -> ColVec:
    """A column vector for tiles of that number of columns (a multiple of 8), uninitialised."""
    if cols % 8 or cols <= 0:
        raise ValueError(f"cv: cols is {cols}, allowed are positive multiples of 8")
    return ColVec(cute.make_rmem_tensor((cols // 4,), Float32), cols)


def columns(x, first, n):
    """Columns ``first .. first + n`` of a register tile (not of 8 bits) or a column vector: a view, no copy. Both
    numbers are known when compiled.

    For reading. A tile that a loop carries and writes through two such views spills: make two tiles of it."""
    if not isinstance(x, (RegTile, ColVec)):
        raise TypeError(f"columns: x is {x}, allowed are register tiles and column vectors")
    if not (isinstance(first, int) and isinstance(n, int)):
        raise TypeError(f"columns: first is {first}, n is {n}, allowed are numbers that are known when compiled: in a "
                        "loop, of cutlass.range_constexpr")
    if first % 8 or n % 8 or first < 0 or n <= 0 or first + n > x.cols:
        raise ValueError(f"columns: {first} and {n} of {x.cols}, allowed are multiples of 8 inside the tile")
    if isinstance(x, ColVec):
        return ColVec(cute.make_tensor(x.tensor.iterator + first // 4, cute.make_layout((n // 4,))), n)
    if x.dtype in FP8 or (x.dtype in HALF and (first % 16 or n % 16)):
        raise TypeError(f"columns: {first} and {n} of {x}, allowed are fp32 tiles, and 16 bits in multiples of 16")
    shape = (2, 2, n // 8), 1, 1
    if x.dtype in HALF:
        shape = (2, 2, 2), 1, n // 16
    return RegTile(cute.make_tensor(x.tensor.iterator + first // 2, cute.make_layout(shape)), n, x.dtype)


def first_row():
    """The first of this thread's two rows of a register tile; the second is 8 below."""
    return (thread_in_warpgroup() // 32) * 16 + lane_id() // 4


def first_col():
    """The first of this thread's columns; its others are at + 1, + 8, + 9, + 16 .."""
    return (lane_id() % 4) * 2


# ---- fills and masks -----------------------------------------------------------------------------


def fill(dst, value):
    """Every element of a register tile or vector becomes ``value``, a number. Each thread, its own elements."""
    _fill("fill", dst, value)


def zero(dst):
    """Every element of a register tile or vector becomes 0. Each thread, its own elements."""
    _fill("zero", dst, 0.0)


def neg_infty(dst):
    """Every element of a register tile or vector becomes -inf. Each thread, its own elements."""
    _fill("neg_infty", dst, -Float32.inf)


def _fill(what, dst, value):
    if not isinstance(dst, (RegTile, RowVec, ColVec)):
        raise TypeError(f"{what}: dst is {dst}, allowed are register tiles and vectors")
    if not isinstance(value, (int, float, Numeric)):
        raise TypeError(f"{what}: value is {value}, allowed is a number")
    dst.tensor.fill(value)


def _side(what, t, diagonal):
    """The checked diagonal of ``right_fill`` and ``left_fill``."""
    if not isinstance(t, RegTile):
        raise TypeError(f"{what}: t is {t}, allowed is a register tile")
    if not isinstance(diagonal, int) or diagonal < 0:
        raise ValueError(f"{what}: diagonal is {diagonal}, allowed are False, True and numbers from 1 on")
    return int(diagonal)


@cute.jit
def _fill_side(t: RegTile, limit, value, diagonal: Constexpr[int], left: Constexpr[bool], end):
    view = t.rows_view
    for r in cutlass.range_constexpr(2):
        lim = limit - first_col()
        if const_expr(diagonal):
            row = first_row() + 8 * r
            lim = lim + (row if const_expr(diagonal == 1) else row // diagonal)
        if const_expr(end is not None):
            lim = cutlass.min(lim, end - first_col())
        bits = _bits_below(lim, t.cols // 4) if const_expr(diagonal) else []
        for j in cutlass.range_constexpr(t.cols // 4):
            either = (t.dtype(value), view[r, j])
            if const_expr(diagonal):
                view[r, j] = either[not left] if (bits[j // 32] & Uint32(1 << j % 32)) != Uint32(0) else either[left]
            else:  # the comparison serves both rows
                view[r, j] = either[not left] if 8 * (j // 2) + j % 2 < lim else either[left]


def _bits_below(limit, n):
    """One bit for each of this thread's ``n`` columns of a row, which are 0 1 8 9 16 17 .. past its first: is it below
    ``limit``? ptxas makes predicates of seven bits at once (R2P), where comparing takes an instruction for each."""
    below = (limit >> 3) * 2 + cutlass.min(limit & 7, 2)
    words = [cutlass.max(cutlass.min(below - first, 32), 0) for first in range(0, n, 32)]
    return [Uint32((Int64(1) << Int64(word)) - Int64(1)) for word in words]


def right_fill(t: RegTile, limit, value, diagonal=False, end=None):
    """Columns >= limit become ``value``. diagonal: limit is row 0's, and one more for each row down; a number n: for
    each n rows; it never falls. end: limit is never more.

    limit is a run-time int, also below 0 or beyond the tile. fp32 and 16 bits."""
    _fill_side(t, limit, value, _side("right_fill", t, diagonal), False, end)


def left_fill(t: RegTile, limit, value, diagonal=False):
    """Columns < limit become ``value``, otherwise as ``right_fill``."""
    _fill_side(t, limit, value, _side("left_fill", t, diagonal), True, None)
