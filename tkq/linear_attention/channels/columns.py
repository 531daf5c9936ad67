"""Decays of each column within a chunk, as factors of the operands of products: a thread's part of it."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import unpacked
from tkq.linear_attention.config import CHUNK
from tkq.tile.assembly import ptx
from tkq.tile.maps import _cvt2

HALVES = (32, 16, 8, 4, 2, 1)  # tokens of a half, level by level
TOGETHER = 8  # rows that a thread reads before it writes them: shared memory answers once for all of them


class Mine(NamedTuple):
    """What a thread has in registers of its two columns and its tokens, 32 or 16 that are neighbours. a: (tokens, 2),
    logarithms of decays, then decays. at: where its words are in a tile, for rows that the swizzle moves alike."""

    a: cute.Tensor
    at: cute.Tensor


class Columns:
    """With a[t] the decay of a column at token t, what token j wrote is at a token i behind it less by the product of
    a[j + 1] .. a[i]. Let h be the highest power of 2 in which i and j differ: i is in the later half of 2 h
    neighbouring tokens and j in the earlier one. Where the later half begins, the product is split in two:

        a[i] .. back to that token's, a factor of row i         the rest, down to a[j + 1], a factor of row j

    So six levels, h = 32, 16, .. 1, with one operand each, give all pairs of a chunk's tokens, and each token has one
    row in it. Factors are products of decays, none of which is above 1 where the decays are not: nothing overflows, a
    decay of 0 forgets exactly, and no logarithms are subtracted."""

    def __init__(self, tile: tk.st):
        self.columns, self.dtype = tile.cols, tile.dtype
        self.mine = 32 if self.columns > 64 else 16  # tokens of a thread, so that all 128 have two columns
        self.row = tile.swizzle // 4  # words of a row of a panel

    @property
    def part(self):
        """Which of the chunk's parts, of as many tokens as a thread has, is this thread's. Made where it is used, and
        not in a register all the time."""
        return tk.thread_in_warpgroup() // (2 * self.mine)

    @property
    def pair(self):
        """This thread's columns are 2 pair and 2 pair + 1."""
        return tk.thread_in_warpgroup() % (2 * self.mine)

    # ---- gates ---------------------------------------------------------------------------------

    def begin(self) -> Mine:
        at = cute.make_rmem_tensor((self.row // 4,), Int32)
        for moved in range(self.row // 4):
            rows = self.pair // self.row * CHUNK + self.part * self.mine
            at[moved] = rows * self.row + ((self.pair % self.row) ^ (4 * moved))
        return Mine(cute.make_rmem_tensor(cute.make_layout((self.mine, 2), stride=(2, 1)), Float32), at)

    def word(self, mine, i):
        """Where a token's is. 16 bytes of a row are moved by what its number of 128 bytes is modulo 8."""
        return mine.at[i * self.row // 32 % (self.row // 4)] + i * self.row

    @cute.jit
    def read(self, gates: cute.Tensor, tokens, columns, chunk, mine: Mine):
        """Logarithms of a chunk, from 0 on. gates: (tokens, columns), columns contiguous. 0 past the end of either."""
        first = chunk * CHUNK + self.part * self.mine
        at = (gates.iterator + cute.crd2idx((first, 2 * self.pair), gates.layout)).toint()
        step = Int64(gates.stride[0]) * 4  # bytes; a pointer's `align` would be rounded in each row
        left = cutlass.select_(2 * self.pair < columns, tokens - first, Int32(0))
        for i in cutlass.range_constexpr(self.mine):
            two = two_of(at, left, i)
            mine.a[i, 0], mine.a[i, 1] = Int32(two).bitcast(Float32), Int32(two >> Int64(32)).bitcast(Float32)
            at = at + step

    @cute.jit
    def decays(self, mine: Mine, products: cute.Tensor):
        """Logarithms become decays. products: (parts * columns,), those of each part for each column."""
        for i in cutlass.range_constexpr(self.mine):
            for e in cutlass.range_constexpr(2):
                mine.a[i, e] = cute.math.exp2(mine.a[i, e] * tk.LOG2E, fastmath=True)
        if 2 * self.pair < self.columns:
            for e in cutlass.range_constexpr(2):
                products[self.part * self.columns + 2 * self.pair + e] = _product(
                    [mine.a[i, e] for i in range(self.mine)])

    # ---- factors -------------------------------------------------------------------------------

    @cute.jit
    def early(self, mine: Mine, products: cute.Tensor, half: Constexpr[int], puts: Constexpr):
        """Of a thread's tokens that are in an earlier half of a level, by puts[0], as `rows` makes it; puts[1] is of
        the later half: of threads that have tokens of one half only, those of both are put at once. products: as
        `decays` has left them, behind a barrier."""
        if 2 * self.pair < self.columns:
            if const_expr(half >= self.mine):
                per = half // self.mine
                beyond = None if const_expr(per == 1) else self.neighbour(products, self.part % 2 == self.part // per)
                if self.part // per % 2 == 0:
                    self.earlier(mine, puts[0], range(self.mine), beyond)
                else:
                    self.later(mine, puts[1], range(self.mine), beyond)
            else:
                for first in cutlass.range_constexpr(0, self.mine, 2 * half):
                    self.earlier(mine, puts[0], range(first, first + half))

    @cute.jit
    def late(self, mine: Mine, half: Constexpr[int], puts: Constexpr):
        """Of those in a later half that `early` has not put."""
        if 2 * self.pair < self.columns:
            if const_expr(half < self.mine):
                for first in cutlass.range_constexpr(half, self.mine, 2 * half):
                    self.later(mine, puts[1], range(first, first + half))

    @cute.jit
    def to_ends(self, mine: Mine, products: cute.Tensor, early: Constexpr, late: Constexpr, total: cute.Tensor):
        """Factors between tokens and the chunk's ends. late: from its start to a token; early: from a token to its end,
        when all of late's are put. total: (columns,), what a chunk decays by."""
        if 2 * self.pair < self.columns:
            parts, part = CHUNK // self.mine, self.part
            before, behind = [Float32(1.0), Float32(1.0)], [Float32(1.0), Float32(1.0)]
            for n in cutlass.range_constexpr(parts):
                for e in cutlass.range_constexpr(2):
                    x = products[n * self.columns + 2 * self.pair + e]
                    before[e] = before[e] * (x if n < part else Float32(1.0))
                    behind[e] = behind[e] * (x if n > part else Float32(1.0))
            self.later(mine, late, range(self.mine), before)
            self.earlier(mine, early, range(self.mine), behind)
            if part == 0:
                for e in cutlass.range_constexpr(2):
                    col = 2 * self.pair + e
                    total[col] = behind[e] * products[col]

    def neighbour(self, products, there):
        """The products of the other part of a half of two, or ones."""
        found = [products[(self.part ^ 1) * self.columns + 2 * self.pair + e] for e in range(2)]
        return [cutlass.select_(there, x, Float32(1.0)) for x in found]

    def earlier(self, mine, put, tokens, f=None):
        """Of each of the tokens, the decays behind it. f: of those behind the last."""
        for some in together(list(reversed(tokens))):
            rows = []
            for i in some:
                rows.append((i, f))
                f = times(f, mine.a, i)
            put(mine, rows)

    def later(self, mine, put, tokens, f=None):
        """Of each of the tokens, the decays up to its own. f: of those before the first."""
        for some in together(list(tokens)):
            rows = []
            for i in some:
                f = times(f, mine.a, i)
                rows.append((i, f))
            put(mine, rows)

    def rows(self, *pairs):
        """put(mine, rows), rows [(token, f)]: to = f * of, for pairs (to, of) of tiles as words; f None for ones."""
        def put(mine, rows):
            at = [self.word(mine, i) for i, _ in rows]
            found = {id(of): [of[n] for n in at] for _, of in pairs}
            made = {key: [x if f is None else scaled(x, f, self.dtype) for x, (_, f) in zip(of, rows)]
                    for key, of in found.items()}
            for to, of in pairs:
                for n, x in zip(at, made[id(of)]):
                    to[n] = x
        return put


def together(tokens):
    return [tokens[n:n + TOGETHER] for n in range(0, len(tokens), TOGETHER)]


def times(f, a, i):
    """f, two numbers or None for ones, with a token's decays."""
    return [a[i, e] if f is None else f[e] * a[i, e] for e in range(2)]


def _product(xs):
    while len(xs) > 1:
        xs = [x * y for x, y in zip(xs[::2], xs[1::2])]
    return xs[0]


def scaled(word, f, dtype):
    """Two numbers of 16 bits, times those of f."""
    two = unpacked(word, dtype)
    return _cvt2(two[0] * f[0], two[1] * f[1], dtype)


@dsl_user_op
def two_of(at, left, i, *, loc=None, ip=None):
    """Two floats of global memory, as 64 bits, where left > i; else zeros. A load with a predicate: the assembler makes
    branches of some conditions."""
    found = ptx([Int64(at), left], "{ .reg .pred p; setp.gt.s32 p, $2, " + str(i) + "; mov.b64 $0, 0; "
                 "@p ld.global.b64 $0, [$1]; }", "=l,l,r", loc, ip, T.i64())
    return Int64(found)


@cute.jit
def gather_scores(p: tk.RegTile, x: tk.RegTile, part: Constexpr[int], half: Constexpr[int], upper: Constexpr[bool],
                  scale):
    """p = scale * x, rounded, where a row and a column are of one level, the row in the later half; upper: in the
    earlier one. scale: a number, or one of each row. half 0 is the diagonal. x: the part-th of p's columns, as many as
    it has. What p has there is 0 before."""
    to, of, mask = cute.recast_tensor(p.tensor, Int32), x.rows_view, _words_of_level(half, upper)
    warp = tk.warp_id() % 4
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for r, n in eights_of_level(w, half, upper, range(part * x.cols // 8, (part + 1) * x.cols // 8)):
                m = 2 * n - part * x.cols // 4
                f = scale.tensor[r] if const_expr(isinstance(scale, tk.RowVec)) else scale
                two = _cvt2(of[r, m] * f, of[r, m + 1] * f, p.dtype)
                to[2 * n + r] = to[2 * n + r] | (two & mask)


@cute.jit
def pick_scores(p: tk.RegTile, of: tk.RegTile, half: Constexpr[int], upper: Constexpr[bool]):
    """p = of, both of 16 bits, where `gather_scores` has something of a level, and 0 elsewhere."""
    to, given = cute.recast_tensor(p.tensor, Int32), cute.recast_tensor(of.tensor, Int32)
    mask = _words_of_level(half, upper)
    warp = tk.warp_id() % 4
    to.fill(0)
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for r, n in eights_of_level(w, half, upper):
                to[2 * n + r] = given[2 * n + r] & mask


@cute.jit
def gather_lower(lower: tk.RegTile, x: tk.RegTile, part: Constexpr[int], half: Constexpr[int]):
    """lower = x where a row and a column are of one level, the row in the later half. x: the part-th of the columns."""
    to, of, mask = lower.rows_view, x.rows_view, _words_of_level(half, False)
    warp = tk.warp_id() % 4
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for r, n in eights_of_level(w, half, False, range(part * x.cols // 8, (part + 1) * x.cols // 8)):
                m = 2 * n - part * x.cols // 4
                to[r, 2 * n] = of[r, m] if mask & Int32(1) != 0 else to[r, 2 * n]
                to[r, 2 * n + 1] = of[r, m + 1] if mask < 0 else to[r, 2 * n + 1]


def eights_of_level(warp, half, upper, columns=range(CHUNK // 8)):
    """[(r, n)]: where there is something of a level in 8 rows, a warp's r-th, and the n-th 8 columns."""
    cells = [(r, n) for r in range(2) for n in columns]
    if half < 8:
        return [(r, n) for r, n in cells if n == 2 * warp + r]
    return [(r, n) for r, n in cells if of_level(8 * (2 * warp + r), 8 * n, half, upper)]


def of_level(row, col, half, upper):
    """Are a row and a column of one level, the row in the later half; upper: in the earlier one?"""
    late, early = (col, row) if upper else (row, col)
    return (late ^ early) // half == 1 and late // half % 2 == 1


@cute.jit
def _words_of_level(half: Constexpr[int], upper: Constexpr[bool]):
    """Which of a word's two elements are of a level, as bits: of rows and columns that are of it with all others."""
    bits = Int32(-1)
    if const_expr(half < 8):
        bits = Int32(0)
        row, lane = tk.lane_id() // 4, tk.lane_id() % 4
        for e in cutlass.range_constexpr(2):
            col = 2 * lane + e
            there = row == col
            if const_expr(half > 0):
                late, early = (col, row) if const_expr(upper) else (row, col)
                there = (late ^ early) // half == 1 and late // half % 2 == 1
            if there:
                bits = bits | Int32(0xffff if e == 0 else -65536)
    return bits


def mul_columns(x: tk.RegTile, factors: cute.Tensor):
    """x[i, j] *= factors[j], fp32 in shared memory."""
    two, view = tk.cv(8), x.rows_view
    for n in range(x.cols // 8):
        tk.load_shared_cols(two, cute.make_tensor(factors.iterator + 8 * n, cute.make_layout(8)))
        for r in range(2):
            for e in range(2):
                view[r, 2 * n + e] = view[r, 2 * n + e] * two.tensor[e]


def scaled_columns(to: tk.RegTile, x: tk.RegTile, factors: cute.Tensor):
    """to[i, j] = x[i, j] * factors[j], of 16 bits."""
    two, view, words = tk.cv(8), x.rows_view, cute.recast_tensor(to.tensor, Int32)
    for n in range(x.cols // 8):
        tk.load_shared_cols(two, cute.make_tensor(factors.iterator + 8 * n, cute.make_layout(8)))
        for r in range(2):
            words[2 * n + r] = _cvt2(*(view[r, 2 * n + e] * two.tensor[e] for e in range(2)), to.dtype)
