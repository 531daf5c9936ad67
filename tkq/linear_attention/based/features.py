"""The features of the second-order Taylor series of exp(q k), each product of two different columns once:

    1 + s + s^2 / 2 = 1 + scale * sum of q[i] k[i] over i + scale^2 / 2 * sum of (q[i] k[i])^2 over i
                    + scale^2 * sum of q[i] q[j] k[i] k[j] over i < j

1 + 16 + 136 = 153 of 160 columns, in blocks of 8. A thread makes the columns that the tensor cores' layout gives it,
two of each block, with no word from another: lane l of four has the row rotated by 4 l columns, y[m] =
x[(4 l + m) % 16], and its columns are

    block 0, 1           y[0] y[1] | y[2] y[3]
    block 2              1 in the first column of all, else 0
    block 3              y[0] y[8], y[1] y[9] in the lower two lanes, y[2] y[10], y[3] y[11] in the upper ones
    block 4 + 2 r        y[0] y[r], y[1] y[1 + r]
    block 5 + 2 r        y[2] y[2 + r], y[3] y[3 + r]        r from 0 to 7
"""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.linear_attention.based.layout import FIRST, blocks
from tkq.linear_attention.config import CHUNK
from tkq.tile.assembly import ptx
from tkq.tile.dtypes import type_name


class Row:
    """A thread's two rows of x, rotated: words[r][m], columns 2 m and 2 m + 1, m from 0 to 5."""

    def __init__(self, tile: tk.SharedTile):
        """tile: 64 x 16, of 16 bits: rows of 32 bytes, whose halves are exchanged in every other four rows (TMA's
        swizzle of 32 bytes). Read in units of 8 bytes."""
        lane, first = tk.lane_id() % 4, tk.first_row()
        exchanged = 2 * (first // 4 % 2)
        units = cute.make_tensor(cute.recast_ptr(tile.tensor.iterator, dtype=Int64),
                                 cute.make_layout((CHUNK, 4), stride=(4, 1)))
        self.upper, self.first_lane = lane >= 2, lane == 0
        self.words = []
        for r in range(2):
            fours = [units[first + 8 * r, ((lane + m) % 4) ^ exchanged] for m in range(3)]
            self.words.append([Int32((x >> Int64(32 * half)) & Int64(0xFFFFFFFF)) for x in fours for half in range(2)])

    def pair(self, r, m):
        """Columns m and m + 1."""
        words = self.words[r]
        if m % 2 == 0:
            return words[m // 2]
        low, high = Uint32(words[m // 2]), Uint32(words[m // 2 + 1])
        return Int32((low >> Uint32(16)) | (high << Uint32(16)))


def make(first: tk.RegTile, second: tk.RegTile, x: Row):
    """The features of x's rows, in two tiles: 64 x FIRST and 64 x (160 - FIRST)."""
    halves = [cute.recast_tensor(t.tensor, Int32) for t in (first, second)]
    dtype = first.dtype
    for r in range(2):
        def product(a, b, r=r):
            return _mul2(x.pair(r, a), x.pair(r, b), dtype)

        ends = [cutlass.select_(x.upper, x.pair(r, m + 2), x.pair(r, m)) for m in (0, 8)]
        made = [x.pair(r, 0), x.pair(r, 2), one(x, dtype), _mul2(*ends, dtype)]
        for shift in range(8):
            made += [product(0, shift), product(2, 2 + shift)]
        for block, word in enumerate(made):
            half, at = (0, block) if block < FIRST // 8 else (1, block - FIRST // 8)
            halves[half][2 * at + r] = word


def one(x: Row, dtype):
    """A pair of the block that has the 1."""
    return cutlass.select_(x.first_lane, Int32(0x3F80 if type_name(dtype) == "bf16" else 0x3C00), Int32(0))


def tokens_near(chunks):
    """(1 / p, p), p the largest power of 2 that is not above the number of tokens in these chunks, 64 at least."""
    bits = Float32(cutlass.max(chunks, 1) * CHUNK).bitcast(Int32) & Int32(0x7F800000)
    return (Int32(0x7F000000) - bits).bitcast(Float32), bits.bitcast(Float32)


def narrow(to: tuple, state: tuple, scale, times):
    """A state over features, V by 160 in two tiles, as operands: with what each product of the features of q and k is
    multiplied by, and a number."""
    linear, square = scale * times, scale * scale * times
    of_kind = {"linear": linear, "one": times, "square": square * 0.5, "pair": square}
    weights = [of_kind[kind] for kind in blocks()]
    for n, first in enumerate((0, FIRST // 8)):
        tk.apply_narrow(to[n], lambda x, column, first=first: x * weights[first + column // 8], state[n], tk.COLUMN)


@dsl_user_op
def _mul2(a, b, dtype, *, loc=None, ip=None):
    """Two products of 16 bits, each rounded once."""
    name = "bf16x2" if type_name(dtype) == "bf16" else "f16x2"
    return Int32(ptx([Int32(a), Int32(b)], f"mul.rn.{name} $0, $1, $2;", "=r,r,r", loc, ip, T.i32(), pure=True))
