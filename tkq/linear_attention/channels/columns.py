"""Decays of each column within a chunk, as factors of the operands of products: a thread's part of it."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.tile.maps import _cvt2

HALVES = (32, 16, 8, 4, 2, 1)  # tokens of a half, level by level
MINE = CHUNK // 2  # tokens of a thread


class Mine(NamedTuple):
    """A thread's columns, 2 pair and 2 pair + 1, of 32 of a chunk's tokens. a: (32, 2), logarithms of decays, then
    decays. at: where its words are in a tile, for rows that the swizzle moves alike."""

    a: cute.Tensor
    at: cute.Tensor

    @property
    def half(self):
        """Made where it is used, and not in a register all the time."""
        return tk.thread_in_warpgroup() // CHUNK

    @property
    def pair(self):
        return tk.thread_in_warpgroup() % CHUNK


class Columns:
    """With a[t] the decay of a column at token t, what token j wrote is at a token i behind it less by the product of
    a[j + 1] .. a[i]. Let h be the highest power of 2 in which i and j differ: i is in the later half of 2 h neighbouring
    tokens and j in the earlier one. Where the later half begins, the product is split in two:

        a[i] .. back to that token's, a factor of row i         the rest, down to a[j + 1], a factor of row j

    So six levels, h = 32, 16, .. 1, with one operand each, give all pairs of a chunk's tokens, and each token has one
    row in it. Factors are products of decays, none of which is above 1 where the decays are not: nothing overflows, a
    decay of 0 forgets exactly, and no logarithms are subtracted."""

    def __init__(self, tile: tk.st):
        self.columns, self.dtype = tile.cols, tile.dtype
        self.row = tile.swizzle // 4  # words of a row of a panel

    # ---- gates ---------------------------------------------------------------------------------

    def begin(self) -> Mine:
        half, pair = tk.thread_in_warpgroup() // CHUNK, tk.thread_in_warpgroup() % CHUNK
        at = cute.make_rmem_tensor((self.row // 4,), Int32)
        for moved in range(self.row // 4):
            panel = pair // self.row * CHUNK + half * MINE
            at[moved] = panel * self.row + ((pair % self.row) ^ (4 * moved))
        return Mine(cute.make_rmem_tensor(cute.make_layout((MINE, 2), stride=(2, 1)), Float32), at)

    def word(self, mine, i):
        """Where a token's is. 16 bytes of a row are moved by what its number of 128 bytes is modulo 8."""
        return mine.at[i * self.row // 32 % (self.row // 4)] + i * self.row

    @cute.jit
    def read(self, gates: cute.Tensor, tokens, chunk, mine: Mine):
        """Logarithms of a chunk, from 0 on. gates: (tokens, columns), columns contiguous. 0 past the end."""
        two = cute.make_layout(2)
        first = chunk * CHUNK + mine.half * MINE
        start = gates.iterator + cute.crd2idx((first, 2 * mine.pair), gates.layout)
        for i in cutlass.range_constexpr(MINE):
            mine.a[i, 0], mine.a[i, 1] = Float32(0.0), Float32(0.0)
            token = first + i
            if token < tokens and 2 * mine.pair < self.columns:
                at = (start + i * gates.stride[0]).align(8)
                cute.autovec_copy(cute.make_tensor(at, two), cute.make_tensor(mine.a.iterator + 2 * i, two))

    @cute.jit
    def decays(self, mine: Mine, products: cute.Tensor):
        """Logarithms become decays. products: (2 * columns,), those of each half for each column."""
        for i in cutlass.range_constexpr(MINE):
            for e in cutlass.range_constexpr(2):
                mine.a[i, e] = cute.math.exp2(mine.a[i, e] * tk.LOG2E, fastmath=True)
        if 2 * mine.pair < self.columns:
            for e in cutlass.range_constexpr(2):
                products[mine.half * self.columns + 2 * mine.pair + e] = _product([mine.a[i, e] for i in range(MINE)])

    # ---- operands ------------------------------------------------------------------------------

    @cute.jit
    def early(self, mine: Mine, half: Constexpr[int], pairs: Constexpr):
        """Rows of a level's operands, of tokens in an earlier half. pairs: (to, of), tiles as words."""
        if 2 * mine.pair < self.columns:
            if const_expr(half == MINE):
                if mine.half == 0:
                    self.earlier(mine, pairs, range(MINE))
            else:
                for first in cutlass.range_constexpr(0, MINE, 2 * half):
                    self.earlier(mine, pairs, range(first, first + half))

    @cute.jit
    def late(self, mine: Mine, half: Constexpr[int], pairs: Constexpr):
        """Of tokens in a later half."""
        if 2 * mine.pair < self.columns:
            if const_expr(half == MINE):
                if mine.half == 1:
                    self.later(mine, pairs, range(MINE))
            else:
                for first in cutlass.range_constexpr(half, MINE, 2 * half):
                    self.later(mine, pairs, range(first, first + half))

    @cute.jit
    def to_ends(self, mine: Mine, products: cute.Tensor, early: Constexpr, late: Constexpr, total: Constexpr):
        """Rows of the operands that meet the state. late: with what decays from the chunk's start to a token; early:
        from a token to the chunk's end; behind those of late, for both may be in place. total: (columns,) or None, what
        a chunk decays by."""
        if 2 * mine.pair < self.columns:
            one, other = (Float32(1.0), Float32(1.0)), []
            for e in cutlass.range_constexpr(2):
                other.append(products[(1 - mine.half) * self.columns + 2 * mine.pair + e])
            before = [other[e] if mine.half == 1 else one[e] for e in range(2)]
            behind = [one[e] if mine.half == 1 else other[e] for e in range(2)]
            self.later(mine, late, range(MINE), before)
            self.earlier(mine, early, range(MINE), behind)
            if const_expr(total is not None):
                if mine.half == 0:
                    for e in cutlass.range_constexpr(2):
                        col = 2 * mine.pair + e
                        total[col] = products[col] * other[e]

    def earlier(self, mine, pairs, tokens, f=None):
        """Of each of the tokens, with the decays behind it. f: of those behind the last."""
        for i in reversed(tokens):
            self.put(mine, pairs, i, f)
            f = times(f, mine.a, i)

    def later(self, mine, pairs, tokens, f=None):
        """Of each of the tokens, with the decays up to its own. f: of those before the first."""
        for i in tokens:
            f = times(f, mine.a, i)
            self.put(mine, pairs, i, f)

    def put(self, mine, pairs, i, f):
        """to = f * of, of a token."""
        at, read = self.word(mine, i), {}
        for to, of in pairs:
            if id(of) not in read:
                read[id(of)] = of[at] if f is None else scaled(of[at], f, self.dtype)
            to[at] = read[id(of)]


def times(f, a, i):
    """f, two numbers or None for ones, with a token's decays."""
    return [a[i, e] if f is None else f[e] * a[i, e] for e in range(2)]


def _product(xs):
    while len(xs) > 1:
        xs = [x * y for x, y in zip(xs[::2], xs[1::2])]
    return xs[0]


def scaled(word, f, dtype):
    """Two numbers of 16 bits, times those of f."""
    if dtype is BFloat16:
        two = (word << Int32(16)).bitcast(Float32), (word & Int32(-65536)).bitcast(Float32)
    else:
        held = cute.make_rmem_tensor((1,), Int32)
        held[0] = word
        two = [Float32(cute.recast_tensor(held, dtype)[e]) for e in range(2)]
    return _cvt2(two[0] * f[0], two[1] * f[1], dtype)


def words(tile: tk.SharedTile) -> Any:
    """A tile of 16 bits as words of two columns each, one after the other as they lie in memory."""
    plain = cute.recast_ptr(tile.staged.iterator, cute.make_swizzle(0, 4, 3), dtype=Int32)
    size = tile.type.bytes // 4
    return cute.make_tensor(plain + tile.stage * size, cute.make_layout(size))


@cute.jit
def gather_scores(p: tk.RegTile, x: tk.RegTile, part: Constexpr[int], half: Constexpr[int], upper: Constexpr[bool],
                  scale):
    """p = scale * x, rounded, where a row and a column are of one level, the row in the later half; upper: in the
    earlier one. half 0 is the diagonal. x: the part-th of p's columns, as many as it has. What p has there is 0
    before."""
    to, of, mask = cute.recast_tensor(p.tensor, Int32), x.rows_view, _words_of_level(half, upper)
    warp = tk.warp_id() % 4
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for r, n in eights_of_level(w, half, upper, range(part * x.cols // 8, (part + 1) * x.cols // 8)):
                m = 2 * n - part * x.cols // 4
                two = _cvt2(of[r, m] * scale, of[r, m + 1] * scale, p.dtype)
                to[2 * n + r] = to[2 * n + r] | (two & mask)


@cute.jit
def gather_lower(lower: tk.RegTile, x: tk.RegTile, half: Constexpr[int]):
    """lower = x where a row and a column are of one level, the row in the later half."""
    to, of, mask = lower.rows_view, x.rows_view, _words_of_level(half, False)
    warp = tk.warp_id() % 4
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for r, n in eights_of_level(w, half, False):
                to[r, 2 * n] = of[r, 2 * n] if mask & Int32(1) != 0 else to[r, 2 * n]
                to[r, 2 * n + 1] = of[r, 2 * n + 1] if mask < 0 else to[r, 2 * n + 1]


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
