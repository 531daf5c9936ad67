"""All pairs of a chunk, or of each of its blocks of 16 tokens, by one product, where decays allow it."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.channels.columns import Columns, Mine, together, unpacked
from tkq.linear_attention.config import CHUNK
from tkq.tile.maps import _cvt2

MOST = 60.0  # of a logarithm to base 2, from the middle of a chunk, or a block, to either end: for 2^60 bf16 has room
EDGE = 16  # tokens of a block
STEPS = CHUNK // EDGE + 1  # of the state through a chunk: in front of each block, and behind the last
WHOLE, BLOCKS = 1, 2  # bits of what a warp has found


def exp2(x):
    return cute.math.exp2(x, fastmath=True)


class WholeShared(NamedTuple):
    """Two stages each. found: of each warp, what its decays allow. steps: (STEPS * columns,), what a column of the
    state is multiplied by in front of a chunk, or of each of its blocks in the order in which they are visited, and
    last of all behind it."""

    found: cute.Tensor
    steps: cute.Tensor


class Whole:
    """Let f[i] be what a column decays by from a chunk's middle, between its 32nd and 33rd token, to token i, above 1
    where i is before it. Then a product of

        rows f[i] q[i]    and    rows k[j] / f[j]

    has D[j+1..i] q[i] k[j] for all pairs of the chunk, in the place of all levels of `Columns`. These rows meet the
    state, too, which is as of the chunk's middle then: it is multiplied by the decays of the chunk's first half before
    it meets them, and by those of the second half when it has taken them up; reversed, the other way round.

    What rounding leaves of these rows is an operand of its own (rest), which P gets two more products of, where it is
    wanted: without it P has two roundings more than its values. The state meets the rounded rows alone.

    It needs factors that 16 bits hold: a chunk has it where the logarithms of each column's decays, all taken as
    positive, are at most MOST together in either half, and where operands are bf16, which have fp32's range.

    A chunk that forgets more may have it block by block: f is then from the middle of a token's block of 16, and of the
    product those pairs are taken whose tokens are of one block. The state takes up a block before it meets the next
    one (see `ChannelState.add_blocks`), so that there are no other pairs. That needs at most MOST in 8 tokens."""

    def __init__(self, spec, columns: Columns):
        self.spec, self.columns, self.there = spec, columns, columns.dtype is BFloat16
        self.parts, self.blocks = CHUNK // columns.mine, columns.mine // EDGE  # the latter of a thread's tokens

    def shared(self, al: tk.SharedAllocator) -> Any:
        """Room for it; None without."""
        if not self.there:
            return None
        return WholeShared(al.vector(4, 2, dtype=Int32), al.vector(STEPS * self.columns.columns, 2))

    def total(self, shared: Any) -> Any:
        """Of a chunk by levels, what a column decays by, (columns, 2): in the place of a step that it has not."""
        K = self.columns.columns
        return cute.make_tensor(shared.steps.iterator + K, cute.make_layout((K, 2), stride=(1, STEPS * K)))

    @cute.jit
    def find(self, mine: Mine, sums: cute.Tensor, found: cute.Tensor):
        """Of logarithms: their sums of each part, for each column, and whether this warp's allow one product for the
        chunk, or for each block."""
        c, near, near_blocks = self.columns, Boolean(True), Boolean(True)
        most, most_of_eight = Float32(MOST * 2 / self.parts / tk.LOG2E), Float32(MOST / tk.LOG2E)
        for e in cutlass.range_constexpr(2):
            total, size = Float32(0.0), Float32(0.0)
            for first in cutlass.range_constexpr(0, c.mine, EDGE // 2):
                eight = Float32(0.0)
                for i in cutlass.range_constexpr(first, first + EDGE // 2):
                    total = total + mine.a[i, e]
                    eight = eight + cute.math.absf(mine.a[i, e])
                near_blocks = near_blocks & (eight <= most_of_eight)  # not where it is NaN
                size = size + eight
            near = near & (size <= most)
            if 2 * c.pair < c.columns:
                sums[c.part * c.columns + 2 * c.pair + e] = total
        all_near, all_blocks = cute.arch.vote_all_sync(near), cute.arch.vote_all_sync(near_blocks)
        if tk.lane_id() == 0:
            found[tk.warp_id() % 4] = (Int32(WHOLE) if all_near else Int32(0)) | (
                Int32(BLOCKS) if all_blocks else Int32(0))

    def holds(self, found: cute.Tensor, what: int = WHOLE) -> Any:
        """Behind a barrier."""
        return cute.arch.make_warp_uniform(found[0] & found[1] & found[2] & found[3] & what) != 0

    @cute.jit
    def put(self, mine: Mine, sums: cute.Tensor, tiles: Constexpr, rest: Constexpr, blocks: Constexpr[bool]):
        """A thread's tokens with their factors, of tiles as words, in place: (keys divided by f, others (None without)
        times f; started, with the delta rule: keys times f). rest: (of keys, of others), what rounding leaves, or
        Nones. blocks: f is from the middle of each block. Rows are read ahead of those that are written."""
        c = self.columns
        if 2 * c.pair < c.columns:
            self.put_rows(mine, None if blocks else self.start(sums), tiles, rest)

    def put_rows(self, mine, log, tiles, rest):
        """log: of f in front of the first token; None with blocks."""
        keys, others, started = tiles
        rest = rest if others is not None else (None, None)
        dtype, f = self.columns.dtype, None if log is None else [exp2(x) for x in log]
        some = together(list(range(self.columns.mine)))
        ahead = self.take(mine, some[0], (keys, others))
        for n, rows in enumerate(some):
            at, of_keys, of_others = ahead
            if n + 1 < len(some):
                ahead = self.take(mine, some[n + 1], (keys, others))
            if log is None and rows[0] % EDGE == 0:
                f = [exp2(-self.of_half(mine, rows[0], e)) for e in range(2)]
            times, over = self.factors(mine, rows, f)
            f = times[-1]
            for m, word in enumerate(at):
                key = unpacked(of_keys[m], dtype)
                self.put_pair(word, (keys, rest[0]), key, over[m])
                if others is not None:
                    self.put_pair(word, (others, rest[1]), unpacked(of_others[m], dtype), times[m])
                if started is not None:
                    self.put_pair(word, (started, None), key, times[m])

    def of_half(self, mine, first, e):
        """The logarithm to base 2 of what half a block decays by, from token `first` on."""
        total = mine.a[first, e]
        for i in range(first + 1, first + EDGE // 2):
            total = total + mine.a[i, e]
        return total * tk.LOG2E

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

    # ---- what the state is multiplied by ---------------------------------------------------------

    def step(self, n, shared: WholeShared, stage) -> cute.Tensor:
        """Of each column, the n-th."""
        K = self.columns.columns
        return cute.make_tensor(shared.steps[None, stage].iterator + n * K, cute.make_layout(K))

    def visited(self, n):
        """Which step is the n-th in the order of the tokens."""
        return STEPS - 1 - n if self.spec.reverse else n

    @cute.jit
    def put_ends(self, sums: cute.Tensor, shared: WholeShared, stage, near: Constexpr[bool]):
        """Of a chunk, from the threads of the first part. Not near: ones, of a chunk by levels, whose operands meet the
        state as it is in front of the chunk."""
        c, half = self.columns, self.parts // 2
        if 2 * c.pair < c.columns and c.part == 0:
            for e in cutlass.range_constexpr(2):
                first, second = Float32(0.0), Float32(0.0)
                if const_expr(near):
                    for n in cutlass.range_constexpr(half):
                        first = first + self.of_part(sums, n, e)
                        second = second + self.of_part(sums, half + n, e)
                col = 2 * c.pair + e
                shared.steps[self.visited(0) * c.columns + col, stage] = exp2(first)
                shared.steps[self.visited(STEPS - 1) * c.columns + col, stage] = exp2(second)

    @cute.jit
    def put_steps(self, mine: Mine, firsts: cute.Tensor, shared: WholeShared, stage):
        """Of the blocks, by all threads. A block's second half is multiplied by the next one's first: where that is
        another thread's, `join_steps` does, behind a barrier. firsts: (parts * columns,), of each part's first
        block."""
        c, K = self.columns, self.columns.columns
        if 2 * c.pair < K:
            for e in cutlass.range_constexpr(2):
                col = 2 * c.pair + e
                first = exp2(self.of_half(mine, 0, e))
                firsts[c.part * K + col] = first
                if c.part == 0:
                    shared.steps[self.visited(0) * K + col, stage] = first
                for b in cutlass.range_constexpr(self.blocks):
                    behind = self.of_half(mine, EDGE * b + EDGE // 2, e)
                    if const_expr(b + 1 < self.blocks):
                        behind = behind + self.of_half(mine, EDGE * (b + 1), e)
                    n = self.visited(c.part * self.blocks + b + 1)
                    shared.steps[n * K + col, stage] = exp2(behind)

    @cute.jit
    def join_steps(self, firsts: cute.Tensor, shared: WholeShared, stage):
        c, K = self.columns, self.columns.columns
        if 2 * c.pair < K and c.part + 1 < self.parts:
            n = self.visited((c.part + 1) * self.blocks)
            for e in cutlass.range_constexpr(2):
                col = 2 * c.pair + e
                shared.steps[n * K + col, stage] = shared.steps[n * K + col, stage] * firsts[(c.part + 1) * K + col]

    # ---- what the products give ------------------------------------------------------------------

    def gather(self, p: tk.RegTile, x: tk.RegTile, scale):
        """p = scale * x, rounded, where a token sees another; 0 elsewhere, where x may be infinite. scale: a number, or
        one of each row."""
        if self.spec.reverse:
            tk.left_fill(x, 0, 0.0, diagonal=True)
        else:
            tk.right_fill(x, 1, 0.0, diagonal=True)
        tk.apply_narrow(p, lambda s, f: s * f, x, scale)
