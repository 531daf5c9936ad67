"""A chunk's outputs, token by token: the part of `TokenRows` that makes them."""
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Uint32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.gates import Gate
from tkq.linear_attention.engine.ssd import Ssd
from tkq.linear_attention.spec import LinearSpec
from tkq.linear_attention.token_rows.plan import GROUPS
from tkq.linear_attention.token_rows.sums import HeadPairs
from tkq.tile.maps import element

BARRIER = 1  # the first of their named barriers; the next one is that of both


def row_sum(o: tk.RegTile, x: tk.RegTile, part: int, r: int):
    """A thread's sum of o times x, which has the part-th 64 of o's columns, in its r-th row: in two chains."""
    of_row = [i for i in range(CHUNK // 2) if i // 2 % 2 == r]
    chains = [[o.tensor[CHUNK // 2 * part + i] * element(x, i) for i in of_row[n::2]] for n in range(2)]
    return sum(chains[0][1:], chains[0][0]) + sum(chains[1][1:], chains[1][0])


class RowsOutputs:
    """O = e^G Q S + P V of a chunk, by one of two warpgroups, every other chunk each. P, the weights of the chunk's own
    pairs, stays in registers: the A operand, in two parts where there are sums of o times x.

    What a token has from itself is apart then, as `engine.ssd.Ssd` says."""

    def __init__(self, spec: LinearSpec, ssd: Ssd, gate: Gate, state: Any, pairs: HeadPairs):
        self.spec, self.ssd, self.gate, self.state, self.pairs, self.dtype = spec, ssd, gate, state, pairs, gate.dtype
        self.tile = tk.st(CHUNK, CHUNK if spec.summed else spec.value_dim, self.dtype)

    @cute.jit
    def make(self, g, s, t, wg, order: Constexpr):
        """All chunks of a warpgroup. order(t, i): the i-th chunk that is visited."""
        rings = [pipe.ring() for pipe in (s.tokens, s.factors, s.states, *self.pairs.pipes(s.pairs))]
        for ring in rings:
            ring.count[0] = Uint32(wg)
        skip, of_skip = self.begin(g, t)
        for i in cutlass.range(wg, t.chunks, GROUPS, unroll=1):
            o = tk.rt_fl(self.spec.value_dim)
            itself = self.products(g, s, o, rings)
            self.finish(g, s, t, o, (order(t, i), wg, rings, itself, skip, of_skip))
            for ring in rings:
                for _ in cutlass.range_constexpr(GROUPS):
                    ring.advance()
        self.put_skip(g, s.skip, t, of_skip, wg)
        tk.store_wait(read=False)

    @cute.jit
    def products(self, g, s, o: tk.RegTile, rings: Constexpr):
        """o; and of each token q k, where that is apart. Q S is under way while P is made."""
        tokens, factors, states, *_ = rings
        x, p, rest, itself = tk.rt_fl(CHUNK), tk.rt(CHUNK, self.dtype), tk.rt(CHUNK, self.dtype), tk.rv()
        gates = None, tk.rv(), tk.cv(CHUNK), tk.cv(CHUNK) if self.gate.adds else None, None
        s.tokens.wait(tokens)
        tk.mm_ABt(x, s.q[tokens.stage], s.k[tokens.stage])
        s.states.wait(states)
        tiles, by_keys = self.state.tiles(s, states.stage), self.state.by_keys
        (tk.mm_AB if const_expr(by_keys) else tk.mm_ABt)(o, s.q[tokens.stage], tiles[0])
        if const_expr(self.spec.exact):
            (tk.mma_AB if const_expr(by_keys) else tk.mma_ABt)(o, s.q[tokens.stage], tiles[1])
        s.factors.wait(factors)
        between = self.gate.between(s.gate, gates, factors.stage)
        tk.mma_wait(self.state.parts)
        if const_expr(self.spec.exact):
            self.diagonal(x, itself)
            self.weigh_in_two((p, rest), x, between, g.scale)
        else:
            self.gate.weigh(p, x, between, g.scale, self.seen)
        tk.mma_wait(0)
        s.states.release(states)
        at_query = tk.rv()
        tk.load_rows(at_query, s.gate.at_query[None, factors.stage], 0, CHUNK)
        tk.mul_row(o, o, at_query)
        tk.mma_AB(o, p, s.v[tokens.stage])
        if const_expr(self.spec.exact):
            tk.mma_AB(o, rest, s.v[tokens.stage])
        tk.mma_wait(0)
        return itself

    def weigh_in_two(self, parts, x, between, scale):
        """The first of the parts = x times scale and the decay from each key to each query, the second what it rounds
        off; without a token itself."""
        def both(s, i, j, f):
            found = s * f * cute.math.exp2(i - j, fastmath=True)
            return found, found - Float32(self.dtype(found))

        self.seen(parts, both, x, *self.gate.weights(between, scale), apart=1)

    def seen(self, to, f, *operands, apart=0):
        """As `tk.apply_triangle`, with the same code for all warps: four would not be in the instruction cache."""
        behind = tk.rv()  # how far a row is behind the thread's first column
        for r in range(2):
            behind.tensor[r] = Float32(tk.first_row() - tk.first_col() + 8 * r)

        def of_seen(*given):
            *rest, row, col = given
            found = f(*rest)
            there = row <= col - apart if self.spec.reverse else row >= col + apart
            if isinstance(to, tuple):
                return [cutlass.select_(there, x, Float32(0.0)) for x in found]
            return cutlass.select_(there, found, Float32(0.0))

        tk.apply_narrow(to, of_seen, *operands, behind, tk.COLUMN)

    @cute.jit
    def diagonal(self, x: tk.RegTile, to: tk.RowVec):
        """Of the 16 columns that a warp's rows have there: a thread has its row's if its first column is one of two."""
        view, warp, row = x.rows_view, tk.warp_id() % 4, tk.lane_id() // 4
        for r in cutlass.range_constexpr(2):
            found = Float32(0.0)
            for w in cutlass.range_constexpr(4):
                for e in cutlass.range_constexpr(2):
                    there = (warp == w) & (tk.first_col() + e == row)
                    found = cutlass.select_(there, view[r, 4 * w + 2 * r + e], found)
            to.tensor[r] = found
        tk.quad_sum(to)

    @cute.jit
    def finish(self, g, s, t, o: tk.RegTile, at: Constexpr):
        """What is left to do of o, 64 columns after the other, and o to global memory; of two heads' sums those first
        that the other block adds, so that what that one gives comes while the rest is done."""
        chunk, wg, rings, itself, skip, of_skip = at
        factors, step, of_parts = rings[1], tk.rv(), range(self.spec.value_dim // CHUNK)
        tk.load_rows(step, s.gate.dt[None, factors.stage], 0, CHUNK)
        if const_expr(self.ssd.apart):
            tk.store_rows(g.ssd.diagonal[t.batch, None, t.head], itself, chunk * CHUNK, g.tokens)
            for r in cutlass.range_constexpr(2):
                itself.tensor[r] = itself.tensor[r] * (step.tensor[r] if const_expr(self.ssd.adds) else g.scale)
        given, by = (rings, chunk, (itself, step, skip), of_skip), (wg, factors.stage % GROUPS)
        if const_expr(not self.spec.summed):
            for part in of_parts:
                self.part(g, s, t, o, (part, part == of_parts[-1]), given)
            self.send(g, s, o, (t.batch, t.head, chunk, 0), by)
        else:
            self.part(g, s, t, o, (1, False), given)
            self.pairs.give(s.pairs, t, o, rings[3])
            self.part(g, s, t, o, (0, True), given)
            self.pairs.take(s.pairs, t, o, rings[3])
            self.send(g, s, tk.columns(o, 0, CHUNK), (t.batch, t.head // 2, chunk, self.pairs.columns(t, 0)), by)

    @cute.jit
    def part(self, g, s, t, o: tk.RegTile, which: Constexpr, given: Constexpr):
        """Of 64 columns: sums of o times x; then what a token has from itself, its step, D. which: their number, and
        whether they are the last ones."""
        (part, last), ((tokens, factors, *_), chunk, of_rows, of_skip) = which, given
        v, x = tk.rt(CHUNK, self.dtype), tk.rt(CHUNK, self.dtype)
        if const_expr(self.ssd.apart or self.ssd.skips):
            tk.load(v, s.v[tokens.stage].panel(part))
        if const_expr(self.spec.has_x):
            tk.load(x, s.x[tokens.stage].panel(part))
        if const_expr(self.spec.dots):
            sums = tk.rv()
            for r in cutlass.range_constexpr(2):
                sums.tensor[r] = row_sum(o, x, part, r)
            tk.quad_sum(sums)
            to = g.dots[self.pairs.columns(t, part), t.batch, None, t.head]
            tk.store_rows(to, sums, chunk * CHUNK, g.tokens)
        if const_expr(of_skip is not None):
            self.sum_skip(x, v, of_skip, part)
        self.complete(o, v, of_rows, part)
        if const_expr(last):
            self.hold(v, x, of_rows[1])
            s.tokens.release(tokens)
            s.factors.release(factors)

    def hold(self, v, x, step):
        """Until what was loaded of a chunk is in registers: the last of a warp's loads, which come in their order."""
        there = self.ssd.apart or self.ssd.skips, self.spec.has_x
        tk.arrived(step, *[loaded for loaded, wanted in zip((v, x), there) if wanted])

    def complete(self, o, v, given, part):
        """given: of rows, q k with its factor and the step; of columns, D."""
        itself, step, skip = given
        for i in range(CHUNK // 2):
            at = CHUNK // 2 * part + i
            r, j, found = i // 2 % 2, at // 4 * 2 + at % 2, o.tensor[at]
            if self.ssd.apart:
                found = found + itself.tensor[r] * element(v, i)
            if self.ssd.gets:
                found = found * step.tensor[r]
            if self.ssd.skips:
                found = found + skip.tensor[j] * element(v, i)
            o.tensor[at] = found

    @cute.jit
    def send(self, g, s, o: tk.RegTile, place, by: Constexpr):
        """By TMA, once what the warpgroup has sent before has left its tile. by: the warpgroup, and its tile's number,
        which is the same; but ptxas takes the loop's counter, which begins with it, for that number."""
        wg, mine = by
        if tk.first_warp_of_group():
            tk.store_wait()
        tk.sync(BARRIER + wg, tk.WARPGROUP)
        tk.store(s.o[mine], o)
        tk.publish()
        tk.sync(BARRIER + wg, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(g.o, s.o[mine], place)

    # ---- D -----------------------------------------------------------------------------------------------------------

    @cute.jit
    def begin(self, g, t) -> Any:
        """(D of this thread's columns, the sums of its gradient); None where there is none."""
        V, skip, sums = self.spec.value_dim, None, None
        if const_expr(self.ssd.skips):
            skip = tk.cv(V)
            for j in cutlass.range_constexpr(V // 4):
                col = tk.first_col() + 8 * (j // 2) + j % 2
                skip.tensor[j] = Float32(g.ssd.skip[t.head] if const_expr(self.spec.ssd.skip_dims == 1)
                                         else g.ssd.skip[t.head, col])
        if const_expr(self.spec.ssd.skip_gradient):
            sums = tk.cv(V)
            tk.zero(sums)
        return skip, sums

    def sum_skip(self, x, v, sums, part):
        """A chunk's part of D's gradient, of 64 columns: x times v."""
        for j in range(CHUNK // 4):
            two, at = [4 * (j // 2) + j % 2 + 2 * r for r in range(2)], CHUNK // 4 * part + j
            sums.tensor[at] = sums.tensor[at] + (element(x, two[0]) * element(v, two[0])
                                                 + element(x, two[1]) * element(v, two[1]))

    @cute.jit
    def put_skip(self, g, room: Any, t, sums: Any, wg):
        """D's gradient, once all chunks are in it: over lanes, then the warps of both warpgroups in their order."""
        if const_expr(sums is not None):
            V = self.spec.value_dim
            for j in cutlass.range_constexpr(V // 4):
                for bit in cutlass.range_constexpr(3):
                    sums.tensor[j] = sums.tensor[j] + cute.arch.shuffle_sync_bfly(sums.tensor[j], offset=4 << bit)
                if tk.lane_id() < 4:
                    room[tk.first_col() + 8 * (j // 2) + j % 2, 4 * wg + tk.warp_id() % 4] = sums.tensor[j]
            tk.sync(BARRIER + GROUPS, GROUPS * tk.WARPGROUP)
            col = tk.thread_in_warpgroup()
            if wg == 0 and col < V:
                of_warps = [room[col, Int32(w)] for w in range(4 * GROUPS)]
                g.ssd.of_skip[t.state, t.head, col] = sum(of_warps[1:], of_warps[0])
