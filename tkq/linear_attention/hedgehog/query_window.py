"""The window of the queries' kernel: the part that has scores of the window, adds up dq, and makes delta."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.sides import near_power
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.linear_attention.hedgehog.weights import following
from tkq.linear_attention.hedgehog.window_rows import COLUMNS, LN2, Rows, add_products, exponentials, make_rows, numbers
from tkq.tile.assembly import opaque_sum

WINDOW_BARRIER = 3  # the named barrier of the warpgroup


@dataclass(frozen=True)
class Window:
    """Registers of a chunk's pairs with 64 keys, and of its queries' gradients."""

    x: tk.RegTile
    dp: tk.RegTile
    dq: tk.RegTile
    rows: Rows
    largest: cute.Tensor  # bits: of the chunk's own keys, of those of the chunk before


def anew(t: Task) -> Task:
    """The same, of which the compiler knows nothing: it makes addresses of it where they are used, in each chunk, as
    there are no registers to keep them."""
    batch, head = (Int32(opaque_sum(Int64(x), Int64(0))) for x in (t.batch, t.head))
    return Task(batch, head, t.chunks)


class WindowPart:
    """Of 64 tokens after the others: ds, dq, the factors' gradients; of those that come next delta."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def run(self, g, s, t):
        c = Window(tk.rt_fl(CHUNK), tk.rt_fl(CHUNK), tk.rt_fl(self.spec.head_dim), make_rows(),
                   cute.make_rmem_tensor((2,), Int32))
        tokens = s.queries.ring()  # one count for all pipes
        s.map_pipe.wait(s.map_pipe.ring())
        s.keys.wait(s.keys.ring())
        s.values.wait(s.values.ring())
        for i in cutlass.range(t.chunks, unroll=1):
            before = tk.Ring(tokens.count, s.keys.stages)
            self.make_scores(g, s, t, c, (tokens, before), i)
            self.lower_largest(g, s, t, c, tokens, i)
            self.put_queries(g, s, t, c, (tokens, before), i)
            tokens.advance()
        tk.store_wait(read=False)

    # ---- scores ----------------------------------------------------------------------------------

    @cute.jit
    def make_scores(self, g, s, t, c, rings, i):
        """ds of both chunks' keys, but for what the largest get less, to shared memory."""
        (tokens, before), rows, here = rings, c.rows, anew(t)
        one, now = tk.Ring(tokens.count, 1), following(before)
        tk.load_rows(rows.most, g.most[here.batch, None, here.head], i * CHUNK, g.tokens)
        tk.load_rows(rows.inverse, g.inverse[here.batch, None, here.head], i * CHUNK, g.tokens)
        tk.mul(rows.weight, rows.inverse, g.window[t.head] * (g.scale * LN2))
        for vector in (rows.total, rows.of_do, rows.count):
            tk.zero(vector)
        if tk.warp_id() % 4 == 0:
            tk.store_wait()
        tk.sync(WINDOW_BARRIER, tk.WARPGROUP)  # dq of the chunk before has left the room of ds
        s.queries.wait(tokens)
        s.gradients.wait(one)
        s.outputs.wait(one)
        tk.mm_ABt(c.dp, s.o[0], s.a[0])
        tk.mm_ABt(c.x, s.x[tokens.stage], s.y[before.stage])
        tk.mma_wait(1)
        self.put_deltas(g, s, here, c, one, i)
        tk.mm_ABt(c.dp, s.a[0], s.b[before.stage])
        tk.mma_wait(1)
        if i == 0:
            tk.neg_infty(c.x)
        self.put_scores(g, s, c, 1)
        s.values.release(before)
        s.keys.wait(now)
        s.values.wait(now)
        tk.mm_ABt(c.x, s.x[tokens.stage], s.y[now.stage])
        tk.mm_ABt(c.dp, s.a[0], s.b[now.stage])
        tk.mma_wait(1)
        tk.right_fill(c.x, 1, -Float32.inf, diagonal=True)
        self.put_scores(g, s, c, 0)
        s.gradients.release(one)

    @cute.jit
    def put_deltas(self, g, s, here, c, one, i):
        """delta, the diagonal of dp = O dO', to shared and to global memory."""
        delta = c.rows.delta
        diagonal(delta, c.dp)
        s.outputs.release(one)
        s.deltas.acquire_empty(one)
        tk.store_rows(s.delta[None, 0], delta, 0, CHUNK)
        s.deltas.commit(one)
        tk.store_rows(g.delta[here.batch, None, here.head], delta, i * CHUNK, g.tokens)

    def put_scores(self, g, s, c, n):
        rows, narrow = c.rows, tk.rt(CHUNK, self.dtype)
        c.largest[n] = exponentials(c.x, rows, g.scale)
        tk.mma_wait(0)
        add_products(rows, c.x, c.dp)
        tk.apply_narrow(narrow, lambda e, d, weight, delta: e * weight * (d - delta), c.x, c.dp, rows.weight,
                        rows.delta)
        tk.store(s.ds[n], narrow)

    @cute.jit
    def lower_largest(self, g, s, t, c, tokens, i):
        """ds, once both sides have told less; the factors' gradients, to global memory."""
        rows, here, one = c.rows, anew(t), tk.Ring(tokens.count, 1)
        s.dys.wait(one)
        for r in cutlass.range_constexpr(2):
            row = tk.first_row() + 8 * r
            rows.less.tensor[r] = s.less[row, 0] + s.less[row, 1]
        numbers(rows, (g.linear[here.head], g.window[here.head]), lambda n, x: tk.store_rows(
            g.of_factors[n, here.batch, here.head, None], x, i * CHUNK, g.tokens))
        tk.store_rows(g.share[here.batch, None, here.head], rows.found, i * CHUNK, g.tokens)
        tk.mul(rows.found, rows.found, g.scale * LN2)
        cute.arch.sync_warp()  # a warp's rows are its own
        for n in cutlass.range_constexpr(2):
            self.lower(s.ds[n].tensor, c.largest[n], rows.found)
        tk.publish()
        tk.sync(WINDOW_BARRIER, tk.WARPGROUP)

    @cute.jit
    def lower(self, tile, bits, less):
        """Those of a tile's elements that have a bit."""
        while bits != 0:
            n = cute.arch.popc((bits & -bits) - 1)
            r, j = n // COLUMNS, n % COLUMNS
            row, col = tk.first_row() + 8 * r, tk.first_col() + 8 * (j // 2) + j % 2
            one = cutlass.select_(r == 0, less.tensor[0], less.tensor[1])
            tile[row, col] = self.dtype(Float32(tile[row, col]) - one)
            bits = bits & (bits - 1)

    # ---- queries -----------------------------------------------------------------------------------

    @cute.jit
    def put_queries(self, g, s, t, c, rings, i):
        """dq to global memory."""
        (tokens, before), maps = rings, s.maps
        one, now = tk.Ring(tokens.count, 1), following(before)
        tk.mm_ABt(c.dq, s.dy[0], maps[0])
        tk.mma_ABt(c.dq, s.dy[1], maps[0])
        if const_expr(self.spec.dtype != "bf16"):
            tk.mma_wait(0)
            tk.mul(c.dq, c.dq, near_power(self.spec, g, t)[1])
        tk.mma_AB(c.dq, s.ds[0], s.y[now.stage])
        tk.mma_AB(c.dq, s.ds[1], s.y[before.stage])
        s.queries.release(tokens)
        tk.mma_wait(0)
        s.dys.release(one)
        s.keys.release(before)
        tk.sync(WINDOW_BARRIER, tk.WARPGROUP)  # ds has been read
        tk.store(s.out[0], c.dq)
        tk.publish()
        tk.sync(WINDOW_BARRIER, tk.WARPGROUP)
        if tk.warp_id() % 4 == 0:
            tk.store_async(g.dx, s.out[0], (t.batch, t.head, i, 0))


def diagonal(v: tk.RowVec, x: tk.RegTile):
    """v[i] = x[i, i], x: 64 x 64. Whole warps."""
    lane, warp, view = tk.lane_id(), tk.warp_id() % 4, x.rows_view
    for r in range(2):
        found = Float32(0.0)
        for n in range(4):
            for odd in range(2):
                here = (warp == n) & (lane // 4 % 2 == odd)
                found = cutlass.select_(here, view[r, 4 * n + 2 * r + odd], found)
        v.tensor[r] = cutlass.select_(lane % 4 == lane // 8, found, Float32(0.0))
    tk.quad_sum(v)
