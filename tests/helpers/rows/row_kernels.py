"""Kernels on RowKernel that show what the engine takes beside sums: other monoids, several exchanges, every stream."""
import math

import cutlass.cute as cute
from cutlass import Float32

from tkq.rows.persistent.kernel import RowKernel
from tkq.rows.persistent.monoid import MAXIMUM, ONLINE_SOFTMAX, Exchange, add, finite_or_zero, softmax_pair
from tkq.utils import rsqrt

LOG2E = math.log2(math.e)


class Softmax(RowKernel):
    """softmax(scale * x), and the log-sum-exp of each row: maximum and sum in one exchange."""

    loads, stores, results, parameters = ("x",), ("y",), ("lse",), ("scale",)
    exchanges = (Exchange(ONLINE_SOFTMAX),)

    def partial(self, e, r):
        return softmax_pair(e.x * (r.scale * LOG2E))

    def row(self, sums, r):
        top, total = sums
        return dict(top=top, inverse=1.0 / total, lse=(top + cute.math.log2(total)) * (1 / LOG2E))

    def write(self, e, r):
        return dict(y=cute.math.exp2(e.x * (r.scale * LOG2E) - r.top, fastmath=True) * r.inverse)


class LogSumExp(RowKernel):
    """Results alone, no store: the log-sum-exp of each row, -inf of a row that is -inf throughout."""

    loads, results = ("x",), ("lse",)
    exchanges = (Exchange(ONLINE_SOFTMAX),)

    def partial(self, e, r):
        return softmax_pair(e.x * LOG2E)

    def row(self, sums, r):
        return dict(lse=(finite_or_zero(sums[0]) + cute.math.log2(sums[1])) * (1 / LOG2E))


class ExactLayerNorm(RowKernel):
    """The mean first, then the squares about it: two exchanges a row."""

    loads, stores, vectors, results, parameters = ("x",), ("y",), ("weight",), ("mean", "rstd"), ("eps",)
    exchanges = (Exchange(add()), Exchange(add(), "squares", "spread"))

    def partial(self, e, r):
        return (e.x,)

    def row(self, sums, r):
        return dict(mean=sums[0] * (1.0 / self.N))

    def squares(self, e, r):
        return ((e.x - r.mean) * (e.x - r.mean),)

    def spread(self, sums, r):
        return dict(rstd=rsqrt(sums[0] * (1.0 / self.N) + r.eps))

    def write(self, e, r):
        y = (e.x - r.mean) * r.rstd
        return dict(y=y * e.weight if self.has("weight") else y)


class ThreeExchanges(RowKernel):
    """y = (x - max) / sum |x - max| * sum (x - max)^2: as a pipeline three rows deep."""

    loads, stores = ("x",), ("y",)
    exchanges = (Exchange(MAXIMUM), Exchange(add(), "lengths", "length"), Exchange(add(), "squares", "square"))

    def partial(self, e, r):
        return (e.x,)

    def row(self, sums, r):
        return dict(top=sums[0])

    def lengths(self, e, r):
        return (r.top - e.x,)

    def length(self, sums, r):
        return dict(length=sums[0])

    def squares(self, e, r):
        return ((e.x - r.top) * (e.x - r.top),)

    def square(self, sums, r):
        return dict(factor=sums[0] / r.length)

    def write(self, e, r):
        return dict(y=(e.x - r.top) * r.factor)


class Moments(RowKernel):
    """Five sums in one exchange: x^0 .. x^4; and the maximum's kernel's opposite, columns from what ``row`` returns."""

    loads, stores, columns, results = ("x",), ("y",), ("total",), ("m0", "m1", "m2", "m3", "m4")
    exchanges = (Exchange(add(5)),)

    def partial(self, e, r):
        x2 = e.x * e.x
        return e.x * 0.0 + 1.0, e.x, x2, x2 * e.x, x2 * x2

    def row(self, sums, r):
        return {f"m{i}": value * (1.0 / self.N) for i, value in enumerate(sums)}

    def write(self, e, r):
        y = e.x - r.m1
        return dict(y=y, total=y * r.m2)


class BiasGradient(RowKernel):
    """Column sums alone: no exchange, no store."""

    loads, columns = ("dy", "more"), ("dbias",)

    def down(self, e, r):
        return dict(dbias=e.dy + e.more if self.has("more") else e.dy)


class Residual(RowKernel):
    """RMSNorm of x + residual in types of their own: two loads, two stores, a vector, a result."""

    loads, stores, vectors, results, parameters = ("x", "residual"), ("y", "total"), ("weight",), ("rstd",), ("eps",)
    options = {"offset": 0.0}  # noqa: RUF012

    def partial(self, e, r):
        x = e.x + e.residual
        return (x * x,)

    def row(self, sums, r):
        return dict(rstd=rsqrt(sums[0] * Float32(1.0 / self.N) + r.eps))

    def write(self, e, r):
        x = e.x + e.residual
        return dict(y=x * r.rstd * (e.weight + self.offset), total=x)
