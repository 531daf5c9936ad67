"""What a row is reduced by: sums, maxima, the pair of the online softmax, or your own.

An element of a monoid is a tuple of fp32 values. A kernel's ``partial`` makes one of a vector of the row's elements:
all of its values numbers, or all vectors, which are combined element by element and reduced at the end.
"""
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr


@dataclass(frozen=True)
class Monoid:
    """combine(a, b): the element of two parts of a row, from theirs. neutral: the element of no part.

    symmetric: combine(b, a) has the same bits as combine(a, b), so that all lanes of a warp come to the same result;
    otherwise the first lane's is given to all. adds: combine adds value by value."""

    combine: Callable
    neutral: tuple
    symmetric: bool = True
    adds: bool = False

    def __post_init__(self):
        if not callable(self.combine):
            raise TypeError(f"Monoid: combine: got {self.combine!r}, allowed is a function of two elements")
        numbers = isinstance(self.neutral, (tuple, list)) and len(self.neutral)
        if not numbers or not all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in self.neutral):
            raise TypeError(f"Monoid: neutral: got {self.neutral!r}, allowed is a tuple of floats, one at least")

    @property
    def sums(self) -> int:
        """Values of an element."""
        return len(self.neutral)


@dataclass(frozen=True)
class Exchange:
    """One reduction over the row. partial, row: the names of the kernel's methods that make its elements and use its
    result."""

    monoid: Monoid
    partial: str = "partial"
    row: str = "row"

    def __post_init__(self):
        if not isinstance(self.monoid, Monoid):
            raise TypeError(f"Exchange: monoid: got {self.monoid!r}, allowed is a Monoid")
        for name in (self.partial, self.row):
            if not isinstance(name, str):
                raise TypeError(f"Exchange: partial, row: got {name!r}, allowed are names of methods")


def maximum(a, b):
    """The larger one, of numbers or of vectors; NaN if either is."""
    if not isinstance(a, cute.TensorSSA):
        return cute.arch.fmax(a, b, nan=True)
    larger = cute.make_rmem_tensor(a.shape, Float32)  # one instruction a number; comparing and choosing are three
    for i in range(cute.size(larger)):
        larger[i] = cute.arch.fmax(a[i], b[i], nan=True)
    return larger.load()


def add(sums: int = 1) -> Monoid:
    """``sums`` values, each added up by itself."""
    if isinstance(sums, bool) or not isinstance(sums, int):
        raise TypeError(f"add: sums: got {sums!r}, allowed are ints from 1 on")
    return Monoid(lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), (0.0,) * sums, adds=True)


def _join(a, b):
    top = maximum(a[0], b[0])
    base = finite_or_zero(top)
    return top, a[1] * cute.math.exp2(a[0] - base, fastmath=True) + b[1] * cute.math.exp2(b[0] - base, fastmath=True)


MAXIMUM = Monoid(lambda a, b: (maximum(a[0], b[0]),), (-float("inf"),))
# (m, sum of 2**(x - m)), m the maximum of x: Milakov and Gimelshein, "Online normalizer calculation", 2018
ONLINE_SOFTMAX = Monoid(_join, (-float("inf"), 0.0), symmetric=False)


def finite_or_zero(x):
    """x, or 0 where it is -inf: what may be subtracted from a row that is -inf throughout."""
    if const_expr(isinstance(x, cute.TensorSSA)):
        return cute.where(x == -Float32.inf, cute.full_like(x, 0.0), x)
    return cutlass.select_(x == -Float32.inf, Float32(0), x)


def softmax_pair(x):
    """The element of ``ONLINE_SOFTMAX`` of a vector; x in units of ln 2."""
    top = x.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
    return top, cute.math.exp2(x - finite_or_zero(top), fastmath=True).reduce(cute.ReductionOp.ADD, 0.0, 0)
