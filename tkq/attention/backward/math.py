"""P and dS of attention's backward, in registers: what both of its kernels compute. Queries may be rows or columns."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk
from tkq.tile.maps import element

NOWHERE = 1 << 30  # the first column that is seen, where none is


@dataclass(frozen=True)
class Scores:
    """What makes a logit of a product: s -> scale * s, or softcap * tanh(scale / softcap * s), times log2(e)."""

    outer: Float32  # scale * log2(e), or softcap * log2(e)
    inner: Float32  # scale / softcap
    capped: Constexpr[bool]

    @staticmethod
    def of(scale, softcap, capped) -> "Scores":
        """In the host function."""
        return Scores((softcap if capped else scale) * tk.LOG2E, scale / softcap if capped else scale, capped)


def element_of(scores: Scores):
    """(s, lse, column, the first column that is seen, the one after the last) -> p, and with a softcap its slope."""
    def of(x, lse, col=0, first=None, end=None):
        x = cute.math.tanh(x * scores.inner, fastmath=True) if scores.capped else x
        e = seen(cute.math.exp2(cute.math.fma(x, scores.outer, lse), fastmath=True), col, first, end)
        return (e, e - e * x * x) if scores.capped else e

    return of


def seen(e, col, first=None, end=None):
    """e in the columns from ``first`` to before ``end``, 0 in others; None: no such limit."""
    e = e if first is None else cutlass.select_(first <= col, e, Float32(0.0))
    return e if end is None else cutlass.select_(col < end, e, Float32(0.0))


def probabilities(p, slope, s, lse, scores: Scores, limits=()):
    """p = exp2(logits of s + lse), 0 outside the limits, rounded; with a softcap slope = p * (1 - tanh ** 2) too.

    lse: -lse * log2(e), a vector along the queries. limits: of ``limits``, the first column of each row that is seen,
    and the one after the last. s itself is written by the tensor cores only: were it written here too, the assembler
    would serialise them."""
    tk.apply_narrow((p, slope) if scores.capped else p, element_of(scores), s, lse, tk.COLUMN, *limits)


def probabilities_fp32(p, s, lse, scores: Scores, limits=()):
    """As ``probabilities``, without a softcap, into a tile of fp32 that is another one than s."""
    of = element_of(scores)
    for i in range(cute.size(p.tensor)):
        p.tensor[i] = of(*[element(x, i) for x in (s, lse, tk.COLUMN, *limits)])


def gradients(ds, slope, dp, delta):
    """ds = slope * (dp + delta). slope: P, in fp32 or rounded; with a softcap what ``probabilities`` calls so. delta:
    dlse - rowsum(o * do), a vector along the queries."""
    tk.apply_narrow(ds, lambda slope, dp, delta: slope * (dp + delta), slope, dp, delta)


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
