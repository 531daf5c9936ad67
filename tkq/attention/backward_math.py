"""P and dS of attention's backward, in registers: what both of its kernels compute. Queries may be rows or columns."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk

NOWHERE = 1 << 30  # the first column that is seen, where none is


def probabilities(p, s, lse, scale_log2, limits=()):
    """p = exp2(scale_log2 * s + lse), 0 outside the limits. lse: -lse * log2(e), a vector along the queries.

    s itself is written by the tensor cores only: were it written here too, the assembler would serialise them.
    limits: of ``limits``, the first column of each row that is seen, and the one after the last."""
    def element(x, lse, col=0, first=None, end=None):
        x = cute.math.exp2(cute.math.fma(x, scale_log2, lse), fastmath=True)
        if first is not None:
            x = cutlass.select_(first <= col, x, Float32(0.0))
        return x if end is None else cutlass.select_(col < end, x, Float32(0.0))

    tk.apply_narrow(p, element, s, lse, tk.COLUMN, *limits)


def gradients(ds, p, dp, delta):
    """ds = p * (dp + delta), from p as it was rounded: s is free by then. delta: dlse - rowsum(o * do)."""
    tk.apply_narrow(ds, lambda p, dp, delta: p * (dp + delta), p, dp, delta)


def limits(first, end, columns=None, rows=None):
    """For ``probabilities``: row i sees the columns ``first + i <= column < end + i`` below ``columns``; rows from
    ``rows`` on see none. None: no such limit."""
    def of_row(f):
        x = cute.make_rmem_tensor((2,), Int32)
        for r in range(2):
            x[r] = f(tk.first_row() + 8 * r)
        return tk.RowVec(x)

    def first_of(row):
        col = Int32(0) if first is None else first + row - tk.first_col()
        return col if rows is None else cutlass.select_(row < rows, col, Int32(NOWHERE))

    def end_of(row):
        ends = [x - tk.first_col() for x in (None if end is None else end + row, columns) if x is not None]
        return ends[0] if len(ends) == 1 else cutlass.min(*ends)

    found = [of_row(first_of)]
    return found if end is None and columns is None else [*found, of_row(end_of)]
