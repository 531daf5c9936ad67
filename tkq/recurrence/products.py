"""Products of a scan's factors, as lists of fp32 numbers whose sum they are: one, or one and what it leaves out.

A product of n equal factors by one number is off by up to n roundings, all of one sign; by two it is as exact as n
steps in order, and more. All is rounded toward 0, so that products of finite factors are finite, and make 0 of a state
of 0."""
import cutlass.cute as cute
from cutlass import Float32

from tkq.tile import assembly


def times(x, y, parts):
    """x times y as `parts` numbers. A factor of one number is exact where parts is two."""
    high = assembly.product_toward_zero(x[0], y[0])
    if parts == 1:
        return [high]
    low = assembly.fma_toward_zero(x[0], y[0], -high)
    for one, lows in ((x[0], y[1:]), (y[0], x[1:])):
        for z in lows:
            low = assembly.fma_toward_zero(one, z, low)
    return [high, low]


def of(factors, parts):
    """The product of some numbers."""
    product = [factors[0]]
    for x in factors[1:]:
        product = times(product, [x], parts)
    return product + [Float32(0.0)] * (parts - len(product))


def grown(factor, state, value):
    """factor state + value."""
    for x in factor:
        value = cute.math.fma(x, state, value)
    return value


def rounded(factor):
    """A product as one number."""
    return factor[0] if len(factor) == 1 else assembly.fma_toward_zero(factor[1], Float32(1.0), factor[0])
