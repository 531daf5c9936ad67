"""All pairs of a chunk by one product, where decays allow it."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.channels.columns import Columns, Mine, together, unpacked
from tkq.linear_attention.config import CHUNK
from tkq.tile.maps import _cvt2

MOST = 60.0  # of a logarithm to base 2, from the middle of a chunk to either end: for 2^60 bf16 has room


def exp2(x):
    return cute.math.exp2(x, fastmath=True)


class WholeShared(NamedTuple):
    """Two stages each. found: of each warp, are a chunk's decays such that `Whole` holds? before, behind: what a column
    of the state is multiplied by in front of a chunk, and behind it."""

    found: cute.Tensor
    before: cute.Tensor
    behind: cute.Tensor


class Whole:
    """Let f[i] be what a column decays by from a chunk's middle, between its 32nd and 33rd token, to token i, above 1
    where i is before it. Then a product of

        rows f[i] q[i]    and    rows k[j] / f[j]

    has D[j+1..i] q[i] k[j] for all pairs of the chunk, in the place of all levels of `Columns`. These rows meet the
    state, too, which is as of the chunk's middle then: it is multiplied by the decays of the chunk's first half before
    it meets them, and by those of the second half when it has taken them up; reversed, the other way round.

    What rounding leaves of these rows is an operand of its own (rest), which P gets two more products of: without it P
    would have two roundings more than what its values see. The state meets the rounded rows alone.

    It needs factors that 16 bits hold: a chunk has it where the logarithms of each column's decays, all taken as
    positive, are at most MOST together in either half, and where operands are bf16, which have fp32's range."""

    def __init__(self, spec, columns: Columns):
        self.spec, self.columns, self.there = spec, columns, columns.dtype is BFloat16
        self.parts = CHUNK // columns.mine

    def shared(self, al: tk.SharedAllocator) -> Any:
        """Room for it; None without."""
        if not self.there:
            return None
        return WholeShared(al.vector(4, 2, dtype=Int32), al.vector(self.columns.columns, 2),
                           al.vector(self.columns.columns, 2))

    @cute.jit
    def find(self, mine: Mine, sums: cute.Tensor, found: cute.Tensor):
        """Of logarithms: their sums of each part, for each column, and whether `Whole` holds for this warp's."""
        c, near = self.columns, Boolean(True)
        most = Float32(MOST * 2 / self.parts / tk.LOG2E)
        for e in cutlass.range_constexpr(2):
            total, size = Float32(0.0), Float32(0.0)
            for i in cutlass.range_constexpr(c.mine):
                total = total + mine.a[i, e]
                size = size + cute.math.absf(mine.a[i, e])
            near = near & (size <= most)  # not where it is NaN
            if 2 * c.pair < c.columns:
                sums[c.part * c.columns + 2 * c.pair + e] = total
        all_near = cute.arch.vote_all_sync(near)
        if tk.lane_id() == 0:
            found[tk.warp_id() % 4] = Int32(1) if all_near else Int32(0)

    def holds(self, found: cute.Tensor) -> Any:
        """Behind a barrier."""
        return cute.arch.make_warp_uniform(found[0] & found[1] & found[2] & found[3]) != 0

    @cute.jit
    def put(self, mine: Mine, sums: cute.Tensor, tiles: Constexpr, rest: Constexpr):
        """A thread's tokens with their factors, of tiles as words, in place: (keys divided by f, others (None without)
        times f; started, with the delta rule: keys times f). rest: (of keys, of others), what rounding leaves; with
        others. Rows are read ahead of those that are written."""
        c = self.columns
        if 2 * c.pair < c.columns:
            self.put_rows(mine, self.start(sums), tiles, rest)

    def put_rows(self, mine, log, tiles, rest):
        keys, others, started = tiles
        rest = rest if others is not None else (None, None)
        dtype, f = self.columns.dtype, [exp2(x) for x in log]
        some = together(list(range(self.columns.mine)))
        ahead = self.take(mine, some[0], (keys, others))
        for n, rows in enumerate(some):
            at, of_keys, of_others = ahead
            if n + 1 < len(some):
                ahead = self.take(mine, some[n + 1], (keys, others))
            times, over = self.factors(mine, rows, f)
            f = times[-1]
            for m, word in enumerate(at):
                key = unpacked(of_keys[m], dtype)
                self.put_pair(word, (keys, rest[0]), key, over[m])
                if others is not None:
                    self.put_pair(word, (others, rest[1]), unpacked(of_others[m], dtype), times[m])
                if started is not None:
                    self.put_pair(word, (started, None), key, times[m])

    def factors(self, mine, rows, f):
        """(f of each of these tokens, 1 / f), from f in front of the first. One reciprocal is taken, of the last: those
        before it are products, which MUFU, a quarter as fast, has no part in."""
        decays = [[exp2(mine.a[i, e] * tk.LOG2E) for e in range(2)] for i in rows]
        times = []
        for a in decays:
            f = [f[e] * a[e] for e in range(2)]
            times.append(f)
        over = [[cute.arch.rcp_approx(x) for x in f]]
        for a in reversed(decays[1:]):
            over.insert(0, [over[0][e] * a[e] for e in range(2)])
        return times, over

    def take(self, mine, rows, tiles):
        """(where words are, those of keys, those of others or Nones)."""
        at = [self.columns.word(mine, i) for i in rows]
        return at, *([None] * len(at) if x is None else [x[n] for n in at] for x in tiles)

    def put_pair(self, word, to, two, f):
        """to[0][word] = two * f, rounded; to[1] what that leaves, None where it is not wanted."""
        exact, dtype = (two[0] * f[0], two[1] * f[1]), self.columns.dtype
        rounded = _cvt2(*exact, dtype)
        to[0][word] = rounded
        if to[1] is not None:
            held = unpacked(rounded, dtype)
            to[1][word] = _cvt2(exact[0] - held[0], exact[1] - held[1], dtype)

    def start(self, sums):
        """The logarithm to base 2 of f in front of a thread's first token: of 2 columns."""
        c, log = self.columns, [Float32(0.0), Float32(0.0)]
        for n in range(1 if self.parts == 2 else self.parts - 1):
            early = n < self.parts // 2
            counts = n >= c.part if early else n < c.part
            for e in range(2):
                x = self.of_part(sums, n, e)
                log[e] = log[e] + cutlass.select_(counts, -x if early else x, Float32(0.0))
        return log

    def of_part(self, sums, n, e):
        return sums[n * self.columns.columns + 2 * self.columns.pair + e] * tk.LOG2E

    @cute.jit
    def put_ends(self, sums: cute.Tensor, shared: WholeShared, stage, near: Constexpr[bool]):
        """What the state is multiplied by, from the threads of the first part. Not near: ones, of a chunk by levels,
        whose operands meet the state as it is in front of the chunk."""
        c, half = self.columns, self.parts // 2
        if 2 * c.pair < c.columns and c.part == 0:
            for e in cutlass.range_constexpr(2):
                first, second = Float32(0.0), Float32(0.0)
                if const_expr(near):
                    for n in cutlass.range_constexpr(half):
                        first = first + self.of_part(sums, n, e)
                        second = second + self.of_part(sums, half + n, e)
                if const_expr(self.spec.reverse):
                    first, second = second, first
                col = 2 * c.pair + e
                shared.before[col, stage] = exp2(first)
                shared.behind[col, stage] = exp2(second)

    def gather(self, p: tk.RegTile, x: tk.RegTile, scale):
        """p = scale * x, rounded, where a token sees another; 0 elsewhere, where x may be infinite."""
        if self.spec.reverse:
            tk.left_fill(x, 0, 0.0, diagonal=True)
        else:
            tk.right_fill(x, 1, 0.0, diagonal=True)
        tk.apply_narrow(p, lambda s: s * scale, x)
