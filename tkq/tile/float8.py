"""Scales of float8, and accumulators that become operands of e4m3."""
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

from ..dtypes import LARGEST
from .assembly import ptx
from .register import RegTile

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: the scale of zeros
OPERAND_GROUP = 16  # columns among which copy_e4m3 changes the order


def scale_of(amax, out):
    """Of what is to become ``out``; NaN where amax is."""
    return nan_max(amax * (1.0 / LARGEST[out]), Float32(SMALLEST_SCALE))


def nan_max(a, b):
    """NaN where one of them is."""
    return cute.arch.fmax(a, b, nan=True)


def operand_column(k):
    """The column, among each 16 of an accumulator, that ``copy_e4m3`` puts at position ``k`` of the operand's 16."""
    return 8 * (k % 4 // 2) + 2 * (k // 4) + k % 2


def groups(x: RegTile) -> int:
    """Of four elements of a thread, which become a word of four bytes."""
    return x.cols // 8


def group_elements(group) -> list:
    """Of an accumulator, in the order of the word's bytes: two columns of a row, and those eight on. The group's row is
    the thread's second one where its number is odd."""
    first = 8 * (group // 2) + 2 * (group % 2)
    return [first + j for j in (0, 1, 4, 5)]


def copy_e4m3(dst: RegTile, src: RegTile, chosen=None):
    """dst = src rounded to e4m3, to nearest even, finite numbers beyond 448 to 448: an fp32 accumulator becomes an A
    operand, without an exchange between threads.

    An accumulator has two neighbouring columns a thread, an operand of 8 bits four: so the columns of each 16 come in
    another order, ``operand_column``, that operand b's rows must have too: a sum over them does not depend on it.
    chosen: which of the ``groups`` of four elements, known when compiled; None: all. Each thread, its own elements."""
    for name, x, dtype in (("dst", dst, Float8E4M3FN), ("src", src, Float32)):
        if not isinstance(x, RegTile) or x.dtype is not dtype:
            raise TypeError(f"copy_e4m3: {name} is {x}, allowed are an e4m3 dst and an fp32 src, register tiles")
    if dst.cols != src.cols:
        raise ValueError(f"copy_e4m3: src is {src}, dst is {dst}: as many columns are allowed")
    words, s = cute.recast_tensor(dst.tensor, Int32), src.tensor
    for group in range(groups(src)) if chosen is None else chosen:
        words[group] = _cvt4([s[i] for i in group_elements(group)])


@dsl_user_op
def _cvt4(four, *, loc=None, ip=None):
    return Int32(ptx([Float32(x) for x in four],
                     "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; "
                     "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }", "=r,f,f,f,f", loc, ip, T.i32(),
                     pure=True))
