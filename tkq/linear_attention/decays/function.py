"""A decay's logarithm of one number, and its derivative, as threads compute them."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk

TERMS = 7  # of the series of atanh(s) / s, s at most 1/3: what is left out is below 2^-25 of it


class Parts(NamedTuple):
    """Of x: e^-|x|, and 1 / (1 + e^-|x|)."""

    e: Float32
    r: Float32


def parts(x) -> Parts:
    e = cute.math.exp2(-cute.math.absf(x) * tk.LOG2E, fastmath=True)
    return Parts(e, cute.arch.rcp_approx(1.0 + e))


def sigmoid(x, of: Parts):
    return cutlass.select_(x < 0.0, of.e * of.r, of.r)


def slope(of: Parts):
    """The derivative of sigmoid."""
    return of.e * of.r * of.r


def softplus(x, of: Parts):
    """max(x, 0) + log(1 + e^-|x|), the latter as 2 atanh(s), s = e / (2 + e): exact for small e, too."""
    s = of.e * cute.arch.rcp_approx(2.0 + of.e)
    square = s * s
    series = Float32(1.0 / (2 * TERMS - 1))
    for n in range(TERMS - 2, -1, -1):
        series = cute.math.fma(series, square, Float32(1.0 / (2 * n + 1)))
    return cute.math.fma(2.0 * s, series, cutlass.select_(x > 0.0, x, Float32(0.0)))
