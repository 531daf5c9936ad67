"""All pairs of a chunk's tokens by one product, where gates of the columns of values allow it."""
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.channels.columns import TOGETHER, Columns, Mine, unpacked
from tkq.linear_attention.config import CHUNK
from tkq.tile.maps import _cvt2

MOST = 60.0  # of a logarithm to base 2, either way from a chunk's middle: bf16 has room for values times 2^60


class WholeOfValues:
    """Let f[i] be what a column decays by from the middle of a chunk, between its tokens 31 and 32, to the end of token
    i: above 1 where i is before it. Then D[j+1..i] = f[i] / f[j] for all pairs of the chunk at once, and one product
    has all of them, where `Columns` takes six levels and the diagonal:

        O[i] = f[i] (S' q[i] + sum over j <= i of (q[i] k[j]) v[j] / f[j]),   S = before S,
        S    = after (S + K' (v[j] / f[j])),     before: of the chunk's first half, after: of its second one

    Reversed, v is multiplied by f, O divided by it, and before and after change places. A chunk has it where operands
    are bf16, which have fp32's range, no gate lets a column grow, and none of its halves decays by more than 2^-MOST.
    All other chunks take the levels: f is then not a number that 16 bits hold. Values beyond 2^68 are not held either.

    Every pair has three roundings then, those of a token with itself, too, of Q K', of v / f and, in sums of outputs
    times x, of x f, where levels have fewer the nearer the tokens are. So Q K' is an operand in two parts of 16 bits,
    what is rounded and what rounding leaves. v / f is, too, and nothing of x is rounded, but where there are pairs of
    passes: the delta rule's values are rounded already. The state's warpgroup, which has f for its outputs, makes v / f
    in registers (`carry`): nothing but f is handed over.

    A thread has 16 tokens of a warp's and two of the 64 columns (`Columns`): each warp sees all columns, so that all
    find the same of a chunk behind one barrier."""

    def __init__(self, columns: Columns):
        self.columns, self.there = columns, columns.dtype is BFloat16
        self.parts = CHUNK // columns.mine

    def sums(self, mine: Mine, sums: cute.Tensor):
        """Of a thread's logarithms of each column; -inf where one of them is above 0. sums: (parts * columns,)."""
        c = self.columns
        for e in range(2):
            a = [mine.a[i, e] for i in range(c.mine)]
            total, most = _tree(a, lambda x, y: x + y), _tree(a, lambda x, y: cutlass.max(x, y))
            sums[c.part * c.columns + 2 * c.pair + e] = cutlass.select_(most <= 0.0, total, -Float32.inf)

    def find(self, sums: cute.Tensor) -> tuple:
        """Behind a barrier: (are this chunk's near enough?, the parts' sums of the thread's columns, [e][part])."""
        c, near = self.columns, Boolean(True)
        of = [[sums[n * c.columns + 2 * c.pair + e] for n in range(self.parts)] for e in range(2)]
        for one in of:
            for half in range(2):
                near = near & (one[2 * half] + one[2 * half + 1] >= -MOST / tk.LOG2E)  # not where it is NaN
        return cute.arch.make_warp_uniform(cute.arch.vote_all_sync(near)), of

    def put(self, mine: Mine, of: list, put: Any, ends: tuple, reverse: Constexpr[bool]):
        """f of a thread's tokens, reversed 1 / f, by put(mine, rows) as `factors_of` makes it; ends: (before, after),
        (columns,) each."""
        c = self.columns
        f = []
        for e in range(2):
            first, second, third, _ = of[e]
            starts = -(first + second), -second, Float32(0.0), third
            start = starts[3]
            for n in range(3):
                start = cutlass.select_(c.part == n, starts[n], start)
            f.append(start * tk.LOG2E)
        for n in range(0, c.mine, TOGETHER):
            taken = []
            for i in range(n, n + TOGETHER):
                f = [cute.math.fma(mine.a[i, e], Float32(tk.LOG2E), f[e]) for e in range(2)]
                taken.append((i, [cute.math.exp2(-x if reverse else x, fastmath=True) for x in f]))
            put(mine, taken)
        self.put_ends(of, ends[::-1] if reverse else ends)

    @cute.jit
    def put_ends(self, of, ends):
        c = self.columns
        for half in cutlass.range_constexpr(2):
            if c.part == half:
                for e in cutlass.range_constexpr(2):
                    total = of[e][2 * half] + of[e][2 * half + 1]
                    ends[half][2 * c.pair + e] = cute.math.exp2(total * tk.LOG2E, fastmath=True)


def carry(first: tk.RegTile, rest: Any, at):
    """first divided by factors, and in rest, if it is not None, what rounding leaves of it: both of 16 bits. at(r, n):
    those of a thread's r-th row and its two of the n-th eight columns."""
    words = cute.recast_tensor(first.tensor, Int32)
    for r in range(2):
        for n in range(first.cols // 8):
            two, f = unpacked(words[2 * n + r], first.dtype), at(r, n)
            two = [x * cute.arch.rcp_approx(y) for x, y in zip(two, f)]
            word = words[2 * n + r] = _cvt2(*two, first.dtype)
            if rest is not None:
                left = [x - y for x, y in zip(two, unpacked(word, first.dtype))]
                cute.recast_tensor(rest.tensor, Int32)[2 * n + r] = _cvt2(*left, first.dtype)


def _tree(xs, f):
    while len(xs) > 1:
        xs = [f(x, y) for x, y in zip(xs[::2], xs[1::2])]
    return xs[0]
