"""Hedgehog's feature map: softmax of a row and of its negative."""
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

import tkq.tile as tk

LEAST = 1e-6  # of a feature


@cute.jit
def make_features(w, y: tk.RegTile, tiles: Constexpr, sums: Constexpr = None):
    """tiles, one behind the other, = softmax of y and of -y along rows, 1e-6 at least, rounded. sums: w.far += a
    thread's part of the features' products with sums, (2 F, 1) fp32. w: registers as `weights.Weights` has them. y is
    negated. NaN stays NaN. One code for both, a loop: what all roles have is to be in the instruction cache."""
    for part in cutlass.range(2, unroll=1):
        softmax(w.e, w.row, y, 1.0)
        tk.apply(w.e, lambda x: cutlass.select_(x < LEAST, Float32(LEAST), x), w.e)
        if const_expr(sums is not None):
            _add_products(w, part, sums)
        tk.store(replace(tiles[0], stage=tiles[0].stage + part), w.e)
        tk.mul(y, y, -1.0)


def softmax(e: tk.RegTile, row: tk.RowVec, y: tk.RegTile, sign: float):
    """e = softmax of sign * y along rows. e may be y. row: is written over. sign: 1.0 or -1.0."""
    _extreme(row, y, cute.arch.fmax if sign > 0 else cute.arch.fmin)
    scale = sign * tk.LOG2E
    tk.mul(row, row, -scale)
    for i in range(cute.size(y.tensor)):
        less = cute.math.fma(y.tensor[i], Float32(scale), row.tensor[i // 2 % 2])
        e.tensor[i] = cute.math.exp2(less, fastmath=True)
    tk.row_sum(row, e)
    tk.apply(row, cute.arch.rcp_approx, row)
    tk.mul_row(e, e, row)


def _extreme(row, y, of):
    """row = of all elements of a row, but for NaN."""
    for r in range(2):
        found = [y.rows_view[r, j] for j in range(2)]
        for j in range(2, y.cols // 4):
            found[j % 2] = of(found[j % 2], y.rows_view[r, j])
        most = of(*found)
        for offset in (1, 2):
            most = of(most, cute.arch.shuffle_sync_bfly(most, offset=offset))
        row.tensor[r] = most


def _add_products(w, part, sums):
    cols, view = tk.cv(w.e.cols), w.e.rows_view
    at = cute.make_tensor(sums.iterator + part * w.e.cols, cute.make_layout(w.e.cols))
    tk.load_shared_cols(cols, at)
    for r in range(2):
        total = w.far.tensor[r]
        for j in range(w.e.cols // 4):
            total = cute.math.fma(view[r, j], cols.tensor[j], total)
        w.far.tensor[r] = total


def add_row(sums, x: tk.RegTile, first):
    """sums[first + j, 0] += x[0, j]: by the four lanes that have the row."""
    view = x.rows_view
    for j in range(x.cols // 4):
        at = first + tk.first_col() + 8 * (j // 2) + j % 2
        sums[at, 0] = sums[at, 0] + view[0, j]
