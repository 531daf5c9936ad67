"""Of the window's part of the gradients: what each query's row adds up, and the factors' gradients that come of it."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.weights import EPS

BELOW_ONE = 1 - 2.0**-24
LEAST_SHARE = 2.0**-16  # of the denominator: as `tkq.reference.hedgehog` has it


@dataclass(frozen=True)
class Rows:
    """Registers of the pairs' warpgroup, numbers of its tokens."""

    most: tk.RowVec
    total: tk.RowVec
    of_do: tk.RowVec
    count: tk.RowVec
    inverse: tk.RowVec
    delta: tk.RowVec
    far_do: tk.RowVec
    far: tk.RowVec
    exact: tk.RowVec
    found: tk.RowVec


def make_rows() -> Rows:
    return Rows(*[tk.rv() for _ in range(10)])


def sums(rows: Rows, parts, scale):
    """Scores become exponentials, 1 where they are the largest and below 1 elsewhere; sums of these, of their
    products with dp, and how many are 1."""
    for vector in (rows.total, rows.of_do, rows.count):
        tk.zero(vector)
    for x, dp in parts:
        e, d = x.rows_view, dp.rows_view
        for r in range(2):
            for j in range(CHUNK // 4):
                less = e[r, j] - rows.most.tensor[r]
                one = cute.math.exp2(less * scale, fastmath=True)
                one = cutlass.select_(one >= 1.0, Float32(BELOW_ONE), one)  # NaN stays
                one = cutlass.select_(less == 0.0, Float32(1.0), one)
                e[r, j] = one
                rows.total.tensor[r] = rows.total.tensor[r] + one
                rows.of_do.tensor[r] = cute.math.fma(one, d[r, j], rows.of_do.tensor[r])
                largest = cutlass.select_(less == 0.0, Float32(1.0), Float32(0.0))
                rows.count.tensor[r] = rows.count.tensor[r] + largest
    for vector in (rows.total, rows.of_do, rows.count):
        tk.quad_sum(vector)


def numbers(rows: Rows, factors, put=None):
    """found = what the largest score gets less; inverse becomes the factor of exponentials. put: a function of 0 or 1
    and `found`, which then has the linear factor's, the window's gradient of each token; or None."""
    linear, window = factors
    one_over = cute.arch.rcp_approx(linear)
    tk.apply(rows.far, lambda inverse, near: cute.arch.rcp_approx(inverse) - EPS - window * near, rows.inverse,
             rows.total)
    tk.apply(rows.exact, lambda inverse, near, less, delta, far: inverse * (
        window * near + linear * less + delta * far), rows.inverse, rows.of_do, rows.far_do, rows.delta, rows.far)
    if put is not None:
        # what is before the window is known from the denominator where it has a part in it: not where linear is near 0
        known = lambda inverse, far: cutlass.select_(
            cute.math.absf(far * inverse) > LEAST_SHARE, far * one_over, Float32(0.0))
        tk.apply(rows.found, lambda inverse, less, delta, exact, far: inverse * (
            less + (delta - exact) * known(inverse, far)), rows.inverse, rows.far_do, rows.delta, rows.exact, rows.far)
        put(0, rows.found)
    tk.apply(rows.found, lambda inverse, near, exact, total: inverse * (near - exact * total), rows.inverse,
             rows.of_do, rows.exact, rows.total)
    if put is not None:
        put(1, rows.found)
    tk.apply(rows.found, lambda x, count: window * x * cute.arch.rcp_approx(count), rows.found, rows.count)
    tk.mul(rows.inverse, rows.inverse, window)


def factors_of(g, t, i):
    """For `numbers`: the factors' gradients of each token of a chunk, to global memory."""
    return lambda n, x: tk.store_rows(g.of_factors[n, t.batch, t.head, None], x, i * CHUNK, g.tokens)


def of_scores(narrow: tk.RegTile, x, dp, rows: Rows, scale):
    """narrow = the gradients of scores, whose exponentials are x, rounded."""
    tk.apply_narrow(narrow, lambda e, d, inverse, delta, less: scale * (
        e * inverse * (d - delta) - cutlass.select_(e == 1.0, less, Float32(0.0))), x, dp, rows.inverse, rows.delta,
        rows.found)
