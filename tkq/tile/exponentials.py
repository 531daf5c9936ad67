"""Exponentials by the units that multiply and add, where those that have a function for it (MUFU) are the bound."""
import cutlass.cute as cute
from cutlass import Float32, Int32

from .maps import _same

# 2 ** r for r from -0.5 to 0.5 is 1 + r * (A + r * (B + r * C)), off by 1.1e-4 of it at most
A, B, C = 0.6932829, 0.24221095, 0.05500893
LEAST = -126.0  # the exponent of the smallest normal number
# Beside a number of this size there is no place for a fraction: added, it rounds to an integer, whose low bits are in
# the low bits of the sum. 127: those bits are an exponent's then.
ROUNDER = 1.5 * 2.0**23 + 127.0


def exp2_polynomial(dst, a, every):
    """dst = 2 ** a, fp32: each ``every``-th element of a thread by a polynomial, off by 2 ** -13, the others as
    ``exp2``; 0: none.

    For a up to 127: below -126 the polynomial gives 2 ** -126, where exp2 gives 0. Integers become powers of 2, NaN
    stays NaN. Each thread, its own elements. A polynomial is nine instructions.

    Source: FlashAttention-4."""
    _same("exp2_polynomial", dst, a, allowed=(Float32,))
    if not isinstance(every, int) or every < 0:
        raise ValueError(f"exp2_polynomial: every is {every}, allowed are numbers from 0 on")
    for i in range(cute.size(dst.tensor)):
        by_hand = every and i % every == every - 1
        dst.tensor[i] = _polynomial(a.tensor[i]) if by_hand else cute.math.exp2(a.tensor[i], fastmath=True)


def _polynomial(x):
    x = cute.arch.fmax(x, Float32(LEAST), nan=True)
    sum_ = x + Float32(ROUNDER)
    r = x - (sum_ - Float32(ROUNDER))
    p = cute.math.fma(cute.math.fma(cute.math.fma(Float32(C), r, Float32(B)), r, Float32(A)), r, Float32(1.0))
    return p * (sum_.bitcast(Int32) << 23).bitcast(Float32)
