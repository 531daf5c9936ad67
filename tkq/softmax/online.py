"""The largest value of a row and the sum of exp(value - largest), of a row that lies on the chip, in one exchange.

Each warp takes its own largest value and sums its exponentials below that; the warps' pairs are joined as Milakov and
Gimelshein join parts of a row ("Online normalizer calculation for softmax", 2018). So every exponential is computed
once.
"""
import functools
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .. import tile as tk
from ..rows.one_pass.kernel import Row
from ..utils import WARP, collect, lanes_used, pack_f32x2, publish, unpack_f32x2, warp_reduce

INF = Float32.inf
LOG2E = tk.LOG2E


def exp(x):
    """e**x by MUFU.EX2, of a number or a vector: about 2 ulp near 0, and |x| rounding errors of x beyond."""
    return cute.math.exp2(x * LOG2E, fastmath=True)


def reciprocal(x):
    """1 / x by MUFU.RCP: within 1 ulp."""
    return cute.arch.rcp_approx(x)


def larger(a, b):
    """The larger of two numbers, and if one is NaN the other."""
    return cute.arch.fmax(a, b)


def log(x):
    """The natural logarithm, within 1 ulp: once a row, and MUFU.LG2 alone would push all of them the same way."""
    return cute.math.log(x)


def finite(top):
    """What is subtracted from a part of the row whose largest value is `top`: 0 where all of it is -inf, so that its
    exponentials are 0 and not exp(-inf + inf)."""
    return cutlass.select_(top == -INF, Float32(0), top)


class OnlineRow:
    """A part of a kernel: that reduction, of the rows that `rows` has, a OnePassRows whose warps exchange Int64: their
    two numbers travel together. value: the function from a vector of elements, fp32, and run-time numbers (`knobs`) to
    its values."""

    def __init__(self, rows, value):
        self.rows, self.value = rows, value

    def values(self, row: Row, j, knobs, neutral=-INF):
        """Vector j's; `neutral` outside the row."""
        return self.rows.masked(self.value(row.block(j), knobs), row, j, neutral)

    def top(self, row: Row, knobs):
        """The largest value of this warp's part of the row."""
        tops = [self.values(row, j, knobs).reduce(cute.ReductionOp.MAX, -INF, 0) for j in range(self.rows.tile.blocks)]
        return warp_reduce(functools.reduce(larger, tops), larger, self.lanes)

    def exponentials(self, row: Row, knobs, below):
        """exp(value - below) for each vector."""
        return [exp(self.values(row, j, knobs) - below) for j in range(self.rows.tile.blocks)]

    def total(self, vectors):
        """The sum of all elements of vectors, over this warp's part of the row."""
        return warp_reduce(sum(vectors[1:], vectors[0]).reduce(cute.ReductionOp.ADD, 0.0, 0), operator.add,
                           self.lanes)

    def join(self, top, total, row: Row):
        """(largest value, sum of exponentials below it) of the row, from those of its warps."""
        if cute.size(row.buffer, mode=[1]) == 1:
            return top, total
        pairs, lanes = self._exchange(top, total, row, -INF)
        top = warp_reduce(functools.reduce(larger, [other for other, _ in pairs]), larger, lanes)
        below = finite(top)
        totals = [part * exp(other - below) for other, part in pairs]
        return top, warp_reduce(sum(totals[1:], totals[0]), operator.add, lanes)

    def add_pairs(self, a, b, row: Row):
        """The sums of two numbers over the warps of the row."""
        if cute.size(row.buffer, mode=[1]) == 1:
            return a, b
        pairs, lanes = self._exchange(a, b, row, 0.0)
        return tuple(warp_reduce(sum(x[1:], x[0]), operator.add, lanes) for x in zip(*pairs))

    def _exchange(self, a, b, row: Row, neutral):
        """(the warps' pairs that this lane has, over how many lanes they go): the first number is `neutral`, the second
        0, where a lane has none."""
        publish(pack_f32x2(a, b), row.buffer, row.mbar_ptr)
        parts = collect(row.buffer, pack_f32x2(Float32(neutral), Float32(0)))
        pairs = [unpack_f32x2(parts[i]) for i in range(cute.size(parts))]
        return pairs, lanes_used(cute.size(row.buffer, mode=[1]))

    @property
    def lanes(self):
        """Of a warp, those that have a row."""
        return min(self.rows.tile.threads_per_row, WARP)
