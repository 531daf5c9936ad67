"""The window of the queries' kernel: the part that has its scores, and sums of rows."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.query_deltas import take
from tkq.linear_attention.hedgehog.query_tiles import DELTA, INVERSE, MOST
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.linear_attention.hedgehog.weights import following
from tkq.linear_attention.hedgehog.window_rows import (
    COLUMNS,
    LN2,
    Rows,
    add_products,
    count_largest,
    exponentials,
    hide_later,
    make_rows,
    numbers,
)
from tkq.tile.assembly import opaque_sum


@dataclass(frozen=True)
class Window:
    """Registers of a chunk's pairs with 64 keys."""

    x: tk.RegTile
    dp: tk.RegTile
    rows: Rows
    largest: cute.Tensor  # bits: of the chunk's own keys, of those of the chunk before


def anew(t: Task) -> Task:
    """The same, of which the compiler knows nothing: it makes addresses of it where they are used, in each chunk, as
    there are no registers to keep them."""
    batch, head = (Int32(opaque_sum(Int64(x), Int64(0))) for x in (t.batch, t.head))
    return Task(batch, head, t.chunks)


class WindowPart:
    """Of 64 tokens after the others: ds, the factors' gradients."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def run(self, g, s, t):
        c = Window(tk.rt_fl(CHUNK), tk.rt_fl(CHUNK), make_rows(), cute.make_rmem_tensor((2,), Int32))
        tokens = s.queries.ring()  # one count for all pipes
        s.keys.wait(s.keys.ring())
        s.values.wait(s.values.ring())
        factors = g.linear[t.head], g.window[t.head]
        for i in cutlass.range(t.chunks, unroll=1):
            self.make_scores(g, s, c, (tokens, i), factors[1] * (g.scale * LN2))
            self.lower_largest(s, c, tokens, factors, g.scale)
            self.put_rows(g, t, c, i)
            tokens.advance()

    @cute.jit
    def make_scores(self, g, s, c, where, scale):
        """ds of both chunks' keys, but for what the largest get less, to shared memory."""
        (tokens, i), rows = where, c.rows
        before = tk.Ring(tokens.count, s.keys.stages)
        one, now = tk.Ring(tokens.count, 1), following(before)
        s.queries.wait(tokens)
        tk.mm_ABt(c.x, s.x[tokens.stage], s.y[before.stage])
        s.gradients.wait(one)
        tk.mm_ABt(c.dp, s.a[0], s.b[before.stage])
        for vector in (rows.total, rows.of_do):
            tk.zero(vector)
        s.deltas.wait(one)
        for vector, which in ((rows.most, MOST), (rows.inverse, INVERSE), (rows.delta, DELTA)):
            take(s, vector, which)
        s.deltas.release(one)
        tk.mma_wait(1)
        s.keys.release(before)
        first = tk.rv()  # before the first chunk there are no keys: scores of 0 are not the largest, and weigh nothing
        tk.apply(first, lambda most: cutlass.select_(i == 0, Float32.inf, most), rows.most)
        c.largest[1] = exponentials(c.x, rows, first, g.scale)
        s.queries.wait(tokens)  # once more: before a branch exponentials stay where they are, while dp is multiplied
        tk.mma_wait(0)
        s.values.release(before)
        s.pairs.acquire_empty(one)
        self.put_scores(s, c, 1, scale)
        s.keys.wait(now)
        s.values.wait(now)
        tk.mm_ABt(c.x, s.x[tokens.stage], s.y[now.stage])
        tk.mm_ABt(c.dp, s.a[0], s.b[now.stage])
        tk.mma_wait(1)
        s.queries.release(tokens)
        hide_later(c.x)
        c.largest[0] = exponentials(c.x, rows, rows.most, g.scale)
        s.keys.wait(now)  # likewise
        tk.mma_wait(0)
        s.gradients.release(one)
        self.put_scores(s, c, 0, scale)

    def put_scores(self, s, c, n, scale):
        rows, narrow, weight, inner = c.rows, tk.rt(CHUNK, self.dtype), tk.rv(), tk.rv()
        add_products(rows, c.x, c.dp)
        tk.mul(weight, rows.inverse, scale)
        tk.apply(inner, lambda weight, delta: -weight * delta, weight, rows.delta)
        tk.apply_narrow(narrow, lambda e, d, weight, less: e * cute.math.fma(d, weight, less), c.x, c.dp, weight,
                        inner)
        tk.store(s.ds[n], narrow)

    @cute.jit
    def lower_largest(self, s, c, tokens, factors, scale):
        """ds, once both sides have told less."""
        rows, one, less = c.rows, tk.Ring(tokens.count, 1), tk.rv()
        tk.quad_sum(rows.of_do)
        count_largest(rows, c.largest)
        s.dys.wait(one)
        for r in cutlass.range_constexpr(2):
            row = tk.first_row() + 8 * r
            rows.less.tensor[r] = s.less[row, 0] + s.less[row, 1]
        s.dys.release(one)
        numbers(rows, factors)
        tk.mul(less, rows.share, scale * LN2)
        cute.arch.sync_warp()  # a warp's rows are its own
        self.lower(s.ds, c.largest, less)
        tk.publish()
        s.pairs.commit(one)

    @cute.jit
    def lower(self, tiles, largest, less):
        """Those of both tiles' elements that have a bit."""
        own, past = largest[0], largest[1]
        while (own | past) != 0:
            of_own = own != 0
            bits = cutlass.select_(of_own, own, past)
            n = cute.arch.popc((bits & -bits) - 1)
            r, j = n // COLUMNS, n % COLUMNS
            row, col = tk.first_row() + 8 * r, tk.first_col() + 8 * (j // 2) + j % 2
            one = cutlass.select_(r == 0, less.tensor[0], less.tensor[1])
            tile = tiles[cutlass.select_(of_own, Int32(0), Int32(1))].tensor
            tile[row, col] = self.dtype(Float32(tile[row, col]) - one)
            rest = bits & (bits - 1)
            own = cutlass.select_(of_own, rest, own)
            past = cutlass.select_(of_own, past, rest)

    def put_rows(self, g, t, c, i):
        """Rows' numbers to global memory."""
        rows, here = c.rows, anew(t)
        for n, x in enumerate((rows.of_linear, rows.of_window)):
            tk.store_rows(g.of_factors[n, here.batch, here.head, None], x, i * CHUNK, g.tokens)
        tk.store_rows(g.share[here.batch, None, here.head], rows.share, i * CHUNK, g.tokens)
