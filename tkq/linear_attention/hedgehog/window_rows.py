"""Of the window's part of the gradients: what each query's row adds up, and the factors' gradients that come of it."""
import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import WARPS
from tkq.linear_attention.hedgehog.weights import EPS
from tkq.tile.assembly import bit_if_equal, made_here

LEAST_SHARE = 2.0**-16  # of the denominator: as `tkq.reference.hedgehog` has it
LN2 = math.log(2)
COLUMNS = CHUNK // 4  # of a thread, of each of its two rows


@dataclass(frozen=True)
class Rows:
    """Registers: numbers of a chunk's tokens."""

    most: tk.RowVec
    inverse: tk.RowVec
    delta: tk.RowVec
    total: tk.RowVec  # sums of exponentials
    of_do: tk.RowVec  # of exponentials times dp
    less: tk.RowVec
    count: tk.RowVec  # of the largest
    far: tk.RowVec
    exact: tk.RowVec
    of_linear: tk.RowVec  # the factors' gradients
    of_window: tk.RowVec
    share: tk.RowVec  # what each score that is the largest gets less


def make_rows() -> Rows:
    return Rows(*[tk.rv() for _ in range(12)])


@cute.jit
def hide_later(x: tk.RegTile):
    """-inf for columns behind the row's own. x: 64 x 64. Whole warps.

    Each warp of a warpgroup has code for its own rows: comparisons with a limit would all be made before the scores are
    there, and kept as bits of a register, which costs more than they do."""
    for warp in cutlass.range_constexpr(WARPS):
        if tk.warp_id() % WARPS == warp:
            _hide_later(x, warp)


def _hide_later(x, warp):
    view = x.rows_view
    for r in range(2):
        edge = 2 * warp + r  # which eight columns the row's own is one of
        for j in range(x.cols // 4):
            if j // 2 == edge:
                view[r, j] = cutlass.select_(tk.first_col() + j % 2 > tk.lane_id() // 4, -Float32.inf, view[r, j])
            elif j // 2 > edge:
                view[r, j] = -Float32.inf


def exponentials(x: tk.RegTile, rows: Rows, most: tk.RowVec, scale) -> Int32:
    """Scores become exponentials, as the forward has them, and add to their rows' sums; a bit for each that is the
    largest of its row: 16 times the row, and the column.

    Whole rows' sums, as a warp's exchange of them stays where it stands: exponentials would otherwise all be made
    behind the waits that follow."""
    bits, view, mine_of = [], x.rows_view, tk.rv()
    for r in range(2):
        mine = Int32(0)
        for j in range(COLUMNS):
            mine = bit_if_equal(mine, j, view[r, j], most.tensor[r])
        count = made_here(Int32(cute.arch.popc(mine)))
        # exponentials, which never have so many, wait for the bits, and take the registers of scores
        less = cutlass.select_(count > COLUMNS, Float32(0.0), most.tensor[r] * scale)
        found = Float32(0.0)
        for j in range(COLUMNS):
            view[r, j] = made_here(cute.math.exp2(view[r, j] * scale - less, fastmath=True))
            found = found + view[r, j]
        mine_of.tensor[r] = found
        bits.append(mine)
    tk.quad_sum(mine_of)
    tk.add(rows.total, rows.total, mine_of)
    return bits[0] | bits[1] << COLUMNS


def count_largest(rows: Rows, largest):
    """rows.count: how many bits of both, of whole rows."""
    for r in range(2):
        mine = [(largest[n] >> COLUMNS * r) & ((1 << COLUMNS) - 1) for n in range(2)]
        rows.count.tensor[r] = Float32(cute.arch.popc(mine[0] | mine[1] << COLUMNS))
    tk.quad_sum(rows.count)


def add_products(rows: Rows, x: tk.RegTile, dp: tk.RegTile):
    """What exponentials times dp add to their rows' sums: of each thread its part."""
    e, d = x.rows_view, dp.rows_view
    for r in range(2):
        for j in range(COLUMNS):
            rows.of_do.tensor[r] = cute.math.fma(e[r, j], d[r, j], rows.of_do.tensor[r])
        rows.of_do.tensor[r] = made_here(rows.of_do.tensor[r])


def numbers(rows: Rows, factors):
    """share, of_linear and of_window of the others: sums of whole rows."""
    linear, window = factors
    one_over = cute.arch.rcp_approx(linear)
    tk.apply(rows.far, lambda inverse, near: cute.arch.rcp_approx(inverse) - EPS - window * near, rows.inverse,
             rows.total)
    tk.apply(rows.exact, lambda inverse, near, less, delta, far: inverse * (
        window * near + linear * less + delta * far), rows.inverse, rows.of_do, rows.less, rows.delta, rows.far)
    tk.apply(rows.of_window, lambda inverse, near, exact, total: inverse * (near - exact * total), rows.inverse,
             rows.of_do, rows.exact, rows.total)
    tk.apply(rows.share, lambda x, count: window * x * cute.arch.rcp_approx(count), rows.of_window, rows.count)
    # what is before the window is known from the denominator where it has a part in it: not where linear is near 0
    known = lambda inverse, far: cutlass.select_(
        cute.math.absf(far * inverse) > LEAST_SHARE, far * one_over, Float32(0.0))
    tk.apply(rows.of_linear, lambda inverse, less, delta, exact, far: inverse * (
        less + (delta - exact) * known(inverse, far)), rows.inverse, rows.less, rows.delta, rows.exact, rows.far)
