"""The sides of the queries' kernel: the state, the gradients of features, and the window's scores."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.query_tiles import COUNT, DELTA, LESS, OF_DO, SHARE, TOTAL
from tkq.linear_attention.hedgehog.sides import (
    BOTH_BARRIER,
    FEATURES,
    LEAST_NARROW,
    SIDE_BARRIER,
    SIDES,
    add_sums,
    features_of_y,
    near_power,
    pairs_of_sums,
    put_state,
)
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.linear_attention.hedgehog.weights import following
from tkq.linear_attention.hedgehog.window_rows import COLUMNS, LN2, add_products, exponentials, hide_later


@dataclass(frozen=True)
class Side:
    """Registers of one side's 64 features, and of a chunk's pairs with 64 keys."""

    sum: tk.RegTile  # features by D
    x: tk.RegTile  # scores, exponentials
    d: tk.RegTile  # delta's product, dp, the features' gradients
    most: tk.RowVec
    inverse: tk.RowVec
    delta: tk.RowVec
    weight: tk.RowVec
    inner: tk.RowVec
    total: tk.RowVec  # sums of exponentials
    of_do: tk.RowVec  # of exponentials times dp
    count: tk.RowVec  # of the largest
    far: tk.RowVec  # less
    largest: cute.Tensor  # bits


class SidePart:
    """One side's 64 features by D, from the first chunk to the last, what queries have of them, and their pairs with
    the keys of their own chunk, or, by the second side, with those of the chunk before."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def run(self, g, s, t, side):
        c = Side(tk.rt_fl(self.spec.head_dim), tk.rt_fl(CHUNK), tk.rt_fl(FEATURES), *[tk.rv() for _ in range(9)],
                 cute.make_rmem_tensor((1,), Int32))
        sums = s.sums
        tk.zero(c.sum)
        c.largest[0] = Int32(0)
        if tk.thread_in_warpgroup() < FEATURES:
            sums[tk.thread_in_warpgroup(), side] = Float32(0.0)
        less, _ = near_power(self.spec, g, t)
        scales = (g.window[t.head] * (g.scale * LN2),
                  g.linear[t.head] * less * cutlass.select_(side == 0, Float32(1.0), Float32(-1.0)))  # of -y: dy's sign
        tokens = s.queries.ring()  # one count for all pipes
        self.ask(g, t, c, 0)
        for i in cutlass.range(t.chunks, unroll=1):
            self.begin_pairs(s, c, side, tokens, g.scale)
            self.put_pairs(g, s, c, side, tokens, (i, scales[0]))
            self.put_gradients(s, c, side, tokens, scales[1])
            self.ask(g, t, c, i + 1)
            self.put_rows(s, c, side, tokens)
            self.end_keys(s, c, side, tokens)
            tokens.advance()
        self.lower_largest(s, c, side, tokens, g.scale)

    def ask(self, g, t, c, i):
        """Rows' numbers of a chunk, which come while others are worked on."""
        tk.load_rows(c.most, g.most[t.batch, None, t.head], i * CHUNK, g.tokens)
        tk.load_rows(c.inverse, g.inverse[t.batch, None, t.head], i * CHUNK, g.tokens)

    # ---- the window ------------------------------------------------------------------------------

    @cute.jit
    def begin_pairs(self, s, c, side, tokens, scale):
        """x: scores; delta. The state, rounded, to shared memory, and what the largest scores of the chunk before get
        less."""
        one, mine = tk.Ring(tokens.count, 1), following(tk.Ring(tokens.count, s.keys.stages), SIDES - 1 - side)
        # none is in flight, which the assembler does not see across branches: it would wait for all where sum is read
        tk.mma_wait(0)
        s.gradients.wait(one)
        s.outputs.wait(one)
        tk.mm_ABt(c.d, s.o[0], s.a[0])
        s.queries.wait(tokens)
        s.keys.wait(mine)
        tk.mm_ABt(c.x, s.x[tokens.stage], s.y[mine.stage])
        put_state(s, c, side)
        if tokens.count[0] > 0:
            self.lower_largest(s, c, side, tokens, scale)
        tk.mma_wait(1)
        s.outputs.release(one)
        diagonal(c.delta, c.d)

    @cute.jit
    def put_pairs(self, g, s, c, side, tokens, where):
        """ds, but for what the largest get less, to shared memory."""
        (i, scale), one, before = where, tk.Ring(tokens.count, 1), tk.Ring(tokens.count, s.values.stages)
        mine, narrow = following(before, SIDES - 1 - side), tk.rt(CHUNK, self.dtype)
        s.values.wait(mine)
        tk.mm_ABt(c.d, s.a[0], s.b[mine.stage])
        tk.mma_wait(1)
        s.queries.release(tokens)
        s.keys.release(tk.Ring(tokens.count, s.keys.stages))
        if side == 0:
            hide_later(c.x)
        elif i == 0:
            tk.neg_infty(c.x)
        for vector in (c.total, c.of_do, c.count):
            tk.zero(vector)
        c.largest[0] = exponentials(c.x, c, g.scale)
        tk.mul(c.weight, c.inverse, scale)
        tk.mma_wait(0)
        add_products(c, c.x, c.d)
        tk.apply(c.inner, lambda weight, delta: -weight * delta, c.weight, c.delta)
        tk.apply_narrow(narrow, lambda e, d, weight, less: e * cute.math.fma(d, weight, less), c.x, c.d, c.weight,
                        c.inner)
        s.pairs.acquire_empty(one)
        tk.store(s.ds[side], narrow)

    @cute.jit
    def lower_largest(self, s, c, side, tokens, scale):
        """ds of the chunk before."""
        last, shares = following(tk.Ring(tokens.count, 1), -1), tk.rv()
        s.shares.wait(last)
        for r in cutlass.range_constexpr(2):
            shares.tensor[r] = s.rows[tk.first_row() + 8 * r, SHARE] * (scale * LN2)
        self.lower(s.ds[side].tensor, c.largest[0], shares)
        tk.publish()
        s.pairs.commit(last)

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

    # ---- before the window -----------------------------------------------------------------------

    @cute.jit
    def put_gradients(self, s, c, side, tokens, scale):
        """dy of one side; far: its part of less; x: sums of the chunk before, which `end_keys` waits for."""
        one, f = tk.Ring(tokens.count, 1), tk.rt(FEATURES, self.dtype)
        tk.mm_ABt(c.d, s.a[0], s.state[side])
        s.x_features.wait(one)
        tk.load(f, s.of_x[side])
        tk.copy(c.x, f)
        tk.mul(c.weight, c.inverse, scale)
        tk.mma_wait(0)
        s.gradients.release(one)
        s.x_features.release(one)
        s.states.commit(one)
        self.add_features(s, c, side)
        self.begin_keys(s, c, side, tokens)
        s.dys.acquire_empty(one)
        dy = tk.rt(FEATURES, self.dtype)
        tk.apply_narrow(dy, lambda z, d, weight, inner: z * cute.math.fma(d, weight, inner), c.x, c.d, c.weight,
                        c.inner)
        tk.store(s.dy[side], dy)
        ones = tk.rt(CHUNK, self.dtype)
        tk.fill(ones, 1.0)
        tk.mm_AB(c.x, ones, features_of_y(s, side))

    def add_features(self, s, c, side):
        """d: gradients of features; far: what they have of them; inner: what the softmax takes from each, with dy's
        weight; x: features become softmaxes, 0 for those at their least, which have no part in it."""
        sums, least = pairs_of_sums(s, side), LEAST_NARROW[self.spec.dtype]
        tk.zero(c.inner)
        tk.zero(c.far)
        view, d = c.x.rows_view, c.d.rows_view
        for block in range(FEATURES // 8):
            cols = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(sums[None, 4 * block + tk.lane_id() % 4], cols)
            for r in range(2):
                for n in range(2):
                    j = 2 * block + n
                    one, found = view[r, j], cute.math.fma(-c.delta.tensor[r], cols[n], d[r, j])
                    c.far.tensor[r] = cute.math.fma(one, found, c.far.tensor[r])
                    one = Float32(cutlass.select_(one <= least, Float32(0.0), one))
                    c.inner.tensor[r] = cute.math.fma(one, found, c.inner.tensor[r])
                    view[r, j], d[r, j] = one, found
        tk.quad_sum(c.inner)
        tk.apply(c.inner, lambda x, weight: -x * weight, c.inner, c.weight)

    @cute.jit
    def put_rows(self, s, c, side, tokens):
        """Sums of both sides, which the first adds up, and dy are there."""
        found, rows, one = ((TOTAL, c.total), (OF_DO, c.of_do), (LESS, c.far), (COUNT, c.count)), s.rows, tk.Ring(
            tokens.count, 1)
        for _, vector in found:
            tk.quad_sum(vector)
        if side == 0:
            tk.sync(BOTH_BARRIER, SIDES * tk.WARPGROUP)
            for n, vector in found:
                for r in cutlass.range_constexpr(2):
                    vector.tensor[r] = vector.tensor[r] + rows[tk.first_row() + 8 * r, n]
            cute.arch.sync_warp()
            for n, vector in (*found, (DELTA, c.delta)):
                tk.store_rows(rows[None, n], vector, 0, CHUNK)
        else:
            for n, vector in found:
                tk.store_rows(rows[None, n], vector, 0, CHUNK)
            tk.sync_arrive(BOTH_BARRIER, SIDES * tk.WARPGROUP)
        tk.publish()
        s.dys.commit(one)

    def begin_keys(self, s, c, side, tokens):
        """The state takes up the chunk before."""
        before = tk.Ring(tokens.count, s.values.stages)
        s.y_features.wait(tk.Ring(tokens.count, 1))
        s.values.wait(before)
        tk.mma_AtB(c.sum, features_of_y(s, side), s.b[before.stage])

    def end_keys(self, s, c, side, tokens):
        """So do the sums."""
        tk.mma_wait(1)
        s.values.release(tk.Ring(tokens.count, s.values.stages))
        tk.mma_wait(0)
        s.y_features.release(tk.Ring(tokens.count, 1))
        tk.sync(SIDE_BARRIER + side, tk.WARPGROUP)  # features and sums have been read
        add_sums(s.sums, c.x, side)


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
