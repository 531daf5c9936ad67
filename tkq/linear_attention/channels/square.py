"""Pairs of tokens of one block of 16, by one product, where decays allow it."""
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.channels.columns import Columns, Mine, times
from tkq.tile.maps import _cvt2

EDGE = 16  # of a block
MOST = 7.5  # of a logarithm to base 2: eight such decays are within 2^60 of one, for which bf16 has room


class Square:
    """In a block of 16 tokens, whose middle is between its eighth and ninth token, let f[i] be what a column decays by
    from the middle to token i, above 1 where i is before it. Then a product of

        rows f[i] q[i]    and    rows k[j] / f[j]

    has D[j+1..i] q[i] k[j] for all pairs of the block at once, in the place of four levels and the diagonal of
    `Columns`. It needs factors that 16 bits hold: a chunk has it where no decay of it is further from 1 than MOST, and
    where operands are bf16, which have fp32's range. All other chunks take the levels."""

    def __init__(self, columns: Columns):
        self.columns, self.there = columns, columns.dtype is BFloat16

    def shared(self, al: tk.SharedAllocator) -> Any:
        """Room for what each warp has found, two stages."""
        return al.vector(4, 2, dtype=Int32) if self.there else None

    @cute.jit
    def find(self, mine: Mine, found: cute.Tensor):
        """Before logarithms become decays: are this warp's all near enough to 1?"""
        near, most = Boolean(True), Float32(MOST / tk.LOG2E)
        for i in cutlass.range_constexpr(2 * self.columns.mine):
            x = mine.a[i // 2, i % 2]
            near = near & (x <= most) & (x >= -most)  # not where it is NaN
        all_near = cute.arch.vote_all_sync(near)
        if tk.lane_id() == 0:
            found[tk.warp_id() % 4] = Int32(1) if all_near else Int32(0)

    def holds(self, found: cute.Tensor) -> Any:
        """Behind a barrier."""
        return cute.arch.make_warp_uniform(found[0] & found[1] & found[2] & found[3]) != 0

    @cute.jit
    def put(self, mine: Mine, early: Constexpr, late: Constexpr):
        """A thread's tokens with their factors. early: puts rows that are divided by f; late: those times f."""
        c = self.columns
        if 2 * c.pair < c.columns:
            for first in cutlass.range_constexpr(0, c.mine, EDGE):
                middle = first + EDGE // 2
                self.put_half(mine, range(middle, first + EDGE), True, (early, late))
                self.put_half(mine, reversed(range(first, middle)), False, (late, early))

    def put_half(self, mine, tokens, own, puts):
        """Away from the middle, f of each token with its own decay or without. puts: of what is divided by f, and of
        what is multiplied."""
        rows, f = [], None
        for i in tokens:
            before, f = f, times(f, mine.a, i)
            rows.append((i, f if own else before))
        puts[1](mine, rows)
        puts[0](mine, [(i, f and [cute.arch.rcp_approx(x) for x in f]) for i, f in rows])


@cute.jit
def gather_square(p: tk.RegTile, x: tk.RegTile, part: Constexpr[int], upper: Constexpr[bool], scale):
    """p = scale * x, rounded, where a row and a column are of one block, the row not before the column; upper: not
    behind it. x: the part-th of p's columns, as many as it has. What p has there is 0 before."""
    to, of, mask = cute.recast_tensor(p.tensor, Int32), x.rows_view, _half_word(upper, 0)
    warp, columns = tk.warp_id() % 4, x.cols // 8
    for w in cutlass.range_constexpr(4):
        if const_expr(2 * w // columns == part):
            if warp == w:
                for r in range(2):
                    for n in (2 * w, 2 * w + 1):
                        m = 2 * (n - part * columns)
                        two = _cvt2(of[r, m] * scale, of[r, m + 1] * scale, p.dtype)
                        if n == 2 * w + r:
                            to[2 * n + r] = two & mask
                        elif (n < 2 * w + r) != upper:
                            to[2 * n + r] = two


@cute.jit
def gather_square_lower(lower: tk.RegTile, x: tk.RegTile, part: Constexpr[int]):
    """lower = x where a row and a column are of one block, the row behind the column. x: the part-th of the columns."""
    to, of, mask = lower.rows_view, x.rows_view, _half_word(False, 1)
    warp, columns = tk.warp_id() % 4, x.cols // 8
    for w in cutlass.range_constexpr(4):
        if const_expr(2 * w // columns == part):
            if warp == w:
                for e in range(2):
                    first = 4 * w - 2 * part * columns
                    to[1, 4 * w + e] = of[1, first + e]
                    there = mask & Int32(1 if e == 0 else -(1 << 31)) != 0
                    for r in range(2):
                        to[r, 4 * w + 2 * r + e] = of[r, first + 2 * r + e] if there else Float32(0.0)


@cute.jit
def _half_word(upper: Constexpr[bool], apart: Constexpr[int]):
    """Of a lane's two elements of 8 x 8, as bits: are their rows `apart` or more behind their columns; upper: before
    them?"""
    bits = Int32(0)
    row, lane = tk.lane_id() // 4, tk.lane_id() % 4
    for e in cutlass.range_constexpr(2):
        behind = row - (2 * lane + e)
        behind = -behind if const_expr(upper) else behind
        if behind >= apart:
            bits = bits | Int32(0xffff if e == 0 else -65536)
    return bits
