"""Exponentials in e4m3 by integers and pairs of float16: without MUFU, and without a conversion."""
import struct

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

from .assembly import ptx
from .float8 import group_elements, groups
from .register import RegTile, RowVec

# The bits of e4m3, a number of 7 bits, are nearly 8 * (x + 7) for 2 ** x: exactly where x is an integer, and by up to
# 0.69 less between two, in the middle. CURVE of those 256ths, times 4 * f * (1 - f) of the fraction f, is that to 0.03.
UNIT = 1024  # of an octave, in the integers below: 128 of them, or 256 of their doubles, are one of the bits
CURVE = 175.7
RANGE = 16.0  # octaves from -8 on; below, the result is 0
# Added to an integer, so that the constants of what follows cancel out: its fraction begins in the middle of an octave
# and 24 further on, which is half of the last bit less what the curve begins with.
LESS = 24
OFFSET = UNIT // 2 + 18 * UNIT - LESS
ROUNDER = 1.5 * 2.0**23  # added to a float32, its low bits are the integer next to it
ROOT = CURVE**0.5 / (UNIT // 2)


def exp2_e4m3(dst: RegTile, src: RegTile, factor, shift: RowVec, chosen):
    """dst = 2 ** (factor * src - shift) rounded to e4m3, of fp32, in ``copy_e4m3``'s order: of those ``chosen`` among
    its ``groups`` of four elements, known when compiled; others stay as they are.

    Exponents up to 8; factor is a number of fp32. Off by 0.6 of the last bit at most, a power of 2 is exact. Of what is
    subnormal in e4m3 bits are 4 * (exponent + 8), off by one, and 0 below. NaN becomes 0, as -inf does. Five
    instructions for a pair, two for each of its elements and one for four. Each thread, its own elements."""
    for name, x, dtype in (("dst", dst, Float8E4M3FN), ("src", src, Float32)):
        if not isinstance(x, RegTile) or x.dtype is not dtype:
            raise TypeError(f"exp2_e4m3: {name} is {x}, allowed are an e4m3 dst and an fp32 src, register tiles")
    if not isinstance(shift, RowVec):
        raise TypeError(f"exp2_e4m3: shift is {shift!r}, allowed is a row vector")
    if dst.cols != src.cols:
        raise ValueError(f"exp2_e4m3: src is {src}, dst is {dst}: as many columns are allowed")
    known = range(groups(src))
    if any(group not in known for group in chosen):
        raise ValueError(f"exp2_e4m3: chosen are {tuple(chosen)}, allowed are groups from 0 to {len(known) - 1}")
    words, s, factor = cute.recast_tensor(dst.tensor, Int32), src.tensor, Float32(factor) * (1 / RANGE)
    begin = [0.5 - shift.tensor[row] * (1 / RANGE) for row in range(2)]
    for group in chosen:
        words[group] = _exp2_of_four([s[i] for i in group_elements(group)], factor, begin[group % 2])


def _f32(x):
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def _twice(x):
    """A float16, in both halves of a word."""
    return f"{struct.unpack('<H', struct.pack('<e', x))[0] * 0x10001:#010x}"


def _both(n):
    """An integer of 16 bits, in both halves."""
    return f"{n % 2**16 * 0x10001:#010x}"


@dsl_user_op
def _exp2_of_four(four, factor, begin, *, loc=None, ip=None):
    """Bytes of e4m3 of 2 ** (RANGE * (factor * x + begin) - 8)."""
    lines = []
    for i in range(4):
        # from 0 to 1, then an integer in the low 16 bits
        lines.append(f"fma.rn.sat.f32 f, ${i + 1}, $5, $6; fma.rn.f32 f, f, {_f32(RANGE * UNIT)}, "
                     f"{_f32(ROUNDER + OFFSET)}; mov.b32 n{i}, f;")
    for pair, (a, b) in (("p", (0, 1)), ("q", (2, 3))):
        lines.append(
            f"prmt.b32 {pair}, n{a}, n{b}, 0x5410;"
            # the fraction, as a float16: 1024 and up, from an octave's begin on
            f"lop3.b32 h, {pair}, 0x03ff03ff, 0x66006600, 0x6a;"
            # the square of its distance from the middle, in the low bits of a float16
            "fma.rn.f16x2 h, h, c, d; fma.rn.f16x2 h, h, h, e;"
            # and of the numbers that are subnormal, where these have fewer bits
            f"add.s16x2 s, {pair}, g;"
            f"mad.lo.u32 {pair}, {pair}, 2, h;"
            f"max.s16x2 {pair}, {pair}, s;")
    text = ("{ .reg .f32 f; .reg .b32 n0, n1, n2, n3, p, q, h, s, c, d, e, g;"
            f"mov.b32 c, {_twice(ROOT)}; mov.b32 d, {_twice(-(1.5 * UNIT - LESS) * ROOT)}; mov.b32 e, {_twice(1024.0)};"
            f"mov.b32 g, {_both(UNIT // 8 - OFFSET)};"
            + " ".join(lines) + "prmt.b32 $0, p, q, 0x7531; }")
    return Int32(ptx([*(Float32(x) for x in four), Float32(factor), Float32(begin)], text, "=r,f,f,f,f,f,f", loc, ip,
                     T.i32(), pure=True))
