"""The third warpgroup of the queries' kernel: it adds up dq, the map's gradient, and what rows have given."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.query_tiles import COUNT, DELTA, LESS, OF_DO, SHARE, TOTAL
from tkq.linear_attention.hedgehog.sides import near_power
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.linear_attention.hedgehog.weights import following
from tkq.linear_attention.hedgehog.window_rows import Rows, make_rows, numbers
from tkq.tile.assembly import opaque_sum

ROWS_BARRIER = 3  # the named barrier of the warpgroup


@dataclass(frozen=True)
class Sums:
    """Registers of a chunk's queries."""

    dq: tk.RegTile
    dmap: tk.RegTile  # the map's gradient, transposed
    rows: Rows


def anew(t: Task) -> Task:
    """The same, of which the compiler knows nothing: it makes addresses of it where they are used, in each chunk, as
    there are no registers to keep them."""
    batch, head = (Int32(opaque_sum(Int64(x), Int64(0))) for x in (t.batch, t.head))
    return Task(batch, head, t.chunks)


class RowsPart:
    """Of 64 tokens after the others: dq, the factors' gradients, and what their largest scores get less."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def run(self, g, s, t):
        D = self.spec.head_dim
        c = Sums(tk.rt_fl(D), tk.rt_fl(D), make_rows())
        tk.zero(c.dmap)
        tokens = s.queries.ring()  # one count for all pipes
        s.map_pipe.wait(s.map_pipe.ring())
        s.keys.wait(s.keys.ring())
        factors = g.linear[t.head], g.window[t.head]
        tk.load_rows(c.rows.inverse, g.inverse[t.batch, None, t.head], 0, g.tokens)
        for i in cutlass.range(t.chunks, unroll=1):
            self.share_out(s, c, tokens, factors)
            self.add_up(g, s, t, c, tokens, i)
            tokens.advance()
        tk.mul(c.dmap, c.dmap, near_power(self.spec, g, t)[1])
        of_head = g.dmap[t.batch, t.head, None, None]
        tk.store_elements(cute.make_tensor(of_head.iterator, cute.select(of_head.layout, [1, 0])), c.dmap, 0, 0)
        if tk.first_warp_of_group():
            tk.store_wait(read=False)

    @cute.jit
    def share_out(self, s, c, tokens, factors):
        """What the largest scores get less, to the sides."""
        one, rows = tk.Ring(tokens.count, 1), c.rows
        s.dys.wait(one)
        for n, vector in ((TOTAL, rows.total), (OF_DO, rows.of_do), (LESS, rows.less), (COUNT, rows.count),
                          (DELTA, rows.delta)):
            for r in cutlass.range_constexpr(2):
                vector.tensor[r] = s.rows[tk.first_row() + 8 * r, n]
        numbers(rows, factors)
        cute.arch.sync_warp()  # a warp's rows are its own
        tk.store_rows(s.rows[None, SHARE], rows.share, 0, CHUNK)
        s.shares.commit(one)

    @cute.jit
    def add_up(self, g, s, t, c, tokens, i):
        """dq, by the room of its queries, the map's gradient; rows' numbers to global memory, and the next chunk's from
        it."""
        rows, here, before = c.rows, anew(t), tk.Ring(tokens.count, s.keys.stages)
        one, now = tk.Ring(tokens.count, 1), following(before)
        for to, x in ((g.of_factors[0, here.batch, here.head, None], rows.of_linear),
                      (g.of_factors[1, here.batch, here.head, None], rows.of_window),
                      (g.share[here.batch, None, here.head], rows.share),
                      (g.delta[here.batch, None, here.head], rows.delta)):
            tk.store_rows(to, x, i * CHUNK, g.tokens)
        tk.load_rows(rows.inverse, g.inverse[here.batch, None, here.head], (i + 1) * CHUNK, g.tokens)
        s.queries.wait(tokens)
        s.keys.wait(now)
        s.pairs.wait(one)  # before all products: those that the sides begin the next chunk with go first
        if const_expr(self.spec.dtype == "bf16"):  # ds first, as the next ones are waited for soonest
            self.multiply_pairs(s, c, (now, before), tk.mm_AB)
            self.multiply_map(s, c, tk.mma_ABt)
        else:
            self.multiply_map(s, c, tk.mm_ABt)
            tk.mma_wait(0)
            tk.mul(c.dq, c.dq, near_power(self.spec, g, t)[1])
            self.multiply_pairs(s, c, (now, before), tk.mma_AB)
        tk.mma_AtB(c.dmap, s.dy[0], s.x[tokens.stage])
        tk.mma_AtB(c.dmap, s.dy[1], s.x[tokens.stage])
        tk.mma_wait(4 if self.spec.dtype == "bf16" else 2)
        s.pairs.release(one)
        s.keys.release(before)
        tk.mma_wait(0)
        s.dys.release(one)
        tk.sync(ROWS_BARRIER, tk.WARPGROUP)  # queries have been read
        tk.store(s.x[tokens.stage], c.dq)
        tk.publish()
        tk.sync(ROWS_BARRIER, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(g.dx, s.x[tokens.stage], (t.batch, t.head, i, 0))
            tk.store_wait()
        s.queries.release(tokens)

    def multiply_pairs(self, s, c, rings, product):
        now, before = rings
        product(c.dq, s.ds[0], s.y[now.stage])
        tk.mma_AB(c.dq, s.ds[1], s.y[before.stage])

    def multiply_map(self, s, c, product):
        product(c.dq, s.dy[0], s.x_map[0])
        tk.mma_ABt(c.dq, s.dy[1], s.x_map[0])
