"""The sides of the keys' kernel: the parts that have the state, gradients of features, and those of values."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import WARPS
from tkq.linear_attention.hedgehog.features import LEAST
from tkq.linear_attention.hedgehog.key_tiles import visited
from tkq.linear_attention.hedgehog.sides import (
    FEATURES,
    SIDE_BARRIER,
    SIDES,
    features_of_y,
    least,
    near_power,
    pairs_of_sums,
    put_features,
    put_state_and_sums,
    side_softmax,
)
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.linear_attention.hedgehog.weights import following

BOTH_BARRIER = 4  # the named barrier of both sides


@dataclass(frozen=True)
class Side:
    """Registers of one side's 64 features."""

    sum: tk.RegTile  # features by D
    e: tk.RegTile
    d: tk.RegTile  # the features' gradients
    dv: tk.RegTile  # of half of D
    row: tk.RowVec
    inner: tk.RowVec
    delta: tk.RowVec
    weight: tk.RowVec
    total: cute.Tensor  # of a feature of the first 64 threads each: the sum over tokens


class SidePart:
    """One side's 64 features by D, from the last chunk to the first, what keys have of them, and half of dv."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def run(self, g, s, t, side):
        D = self.spec.head_dim
        d = tk.rt_fl(FEATURES)
        dv = d if D == SIDES * FEATURES else tk.rt_fl(D // SIDES)  # a product's registers are taken also before it
        c = Side(tk.rt_fl(D), tk.rt_fl(FEATURES), d, dv, *[tk.rv() for _ in range(4)],
                 cute.make_rmem_tensor((1,), Float32))
        tk.zero(c.sum)
        c.total[0] = Float32(0.0)
        less, power = near_power(self.spec, g, t)
        scale = g.linear[t.head] * less
        tokens = s.keys.ring()  # one count for all pipes
        s.map_pipe.wait(s.map_pipe.ring())
        self.begin_y(s, c, tokens)
        tk.mma_wait(0)
        s.keys.release(tokens)
        for i in cutlass.range(t.chunks, unroll=1):
            self.take_state(s, c, side, tokens, i)
            self.put_gradients(s, c, side, tokens, power)
            self.add_queries(g, s, t, c, side, tokens, (i, scale))
            self.put_values(g, s, t, c, side, tokens, i)
            tokens.advance()
        tk.store_wait(read=False)

    def begin_y(self, s, c, tokens):
        s.keys.wait(tokens)
        tk.mm_AB(c.e, s.x[tokens.stage], s.maps[0])

    @cute.jit
    def take_state(self, s, c, side, tokens, i):
        """d = what a chunk has of the state, which is rounded; e: the softmax of its y, and features of it, to shared
        memory."""
        one = tk.Ring(tokens.count, 1)
        put_state_and_sums(s, c, side)
        s.values.wait(one)
        tk.mm_ABt(c.d, s.a[0], s.state[side])
        self.release_pairs(s, tokens, i)
        side_softmax(c, side)
        s.dys.acquire_empty(one)
        features = tk.rt(FEATURES, self.dtype)
        tk.apply_narrow(features, least, c.e)
        tk.store(s.dy[side], features)
        tk.publish()
        tk.mma_wait(0)
        s.values.release(one)

    @cute.jit
    def release_pairs(self, s, tokens, i):
        """Of the chunk behind, once dv has left their room: by the warp that stored it."""
        if i > 0 and tk.warp_id() % WARPS == 0:
            tk.store_wait()
            s.pairs.release(following(tk.Ring(tokens.count, 1), -1))

    @cute.jit
    def put_gradients(self, s, c, side, tokens, power):
        """dy of one side; dv of half of D, but for the window's."""
        self.add_features(s, c, side)
        dy = tk.rt(FEATURES, self.dtype)
        tk.copy(dy, c.d)
        tk.sync(BOTH_BARRIER, SIDES * tk.WARPGROUP)  # features and states are there
        tk.mm_AB(c.dv, s.dy[0], s.state[0], b_part=side)
        tk.mma_AB(c.dv, s.dy[1], s.state[1], b_part=side)
        tk.mma_wait(0)
        tk.sync(BOTH_BARRIER, SIDES * tk.WARPGROUP)  # they have been read
        tk.store(s.dy[side], dy)
        tk.publish()
        s.dys.commit(tk.Ring(tokens.count, 1))
        if const_expr(self.spec.dtype != "bf16"):
            tk.mul(c.dv, c.dv, power)

    def add_features(self, s, c, side):
        """d: gradients of features, and then of y."""
        sums = pairs_of_sums(s, side)
        tk.zero(c.inner)
        view, d = c.e.rows_view, c.d.rows_view
        for block in range(FEATURES // 8):
            cols = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(sums[None, 4 * block + tk.lane_id() % 4], cols)
            for r in range(2):
                for n in range(2):
                    j = 2 * block + n
                    one, found = view[r, j], d[r, j] - cols[n]
                    d[r, j] = Float32(cutlass.select_(one < LEAST, Float32(0.0), found))
                    c.inner.tensor[r] = cute.math.fma(one, d[r, j], c.inner.tensor[r])
        tk.quad_sum(c.inner)
        sign = cutlass.select_(side == 0, Float32(1.0), Float32(-1.0))
        for r in range(2):
            inner = c.inner.tensor[r] * sign
            for j in range(FEATURES // 4):
                d[r, j] = view[r, j] * cute.math.fma(d[r, j], sign, -inner)

    @cute.jit
    def add_queries(self, g, s, t, c, side, tokens, where):
        """The state takes up the chunk behind, but for the product, which `put_values` waits for."""
        (i, scale), behind = where, tokens
        self.ask(g, t, c, visited(t, i) + 1)
        s.queries.wait(behind)
        tk.mm_AB(c.e, s.y[behind.stage], s.maps[1])
        tk.mma_wait(0)
        s.queries.release(behind)
        side_softmax(c, side)
        self.weigh(g, c, visited(t, i) + 1, scale)
        tk.apply(c.e, least, c.e)
        tk.mul_row(c.e, c.e, c.weight)
        put_features(s, c, side, c.delta, i > 0)
        s.gradients.wait(behind)
        tk.mma_AtB(c.sum, features_of_y(s, side), s.b[behind.stage])

    def ask(self, g, t, c, chunk):
        """Rows' numbers of queries, which come while features are made."""
        for to, x in ((c.weight, g.inverse), (c.delta, g.delta)):
            tk.load_rows(to, x[t.batch, None, t.head], chunk * CHUNK, g.tokens)

    def weigh(self, g, c, chunk, scale):
        """weight of inverse: 0 past the last token."""
        for r in range(2):
            there = chunk * CHUNK + tk.first_row() + 8 * r < g.tokens
            c.weight.tensor[r] = cutlass.select_(there, c.weight.tensor[r] * scale, Float32(0.0))

    @cute.jit
    def put_values(self, g, s, t, c, side, tokens, i):
        """dv of half of D, to global memory; the next chunk's y."""
        one, behind, now = tk.Ring(tokens.count, 1), tokens, following(tokens)
        s.gradients.wait(now)
        s.pairs.wait(one)
        tk.mma_AtB(c.dv, s.p[0], s.b[now.stage], b_part=side)
        tk.mma_AtB(c.dv, s.p[1], s.b[behind.stage], b_part=side)
        self.begin_y(s, c, now)
        tk.mma_wait(0)
        s.gradients.release(behind)
        s.keys.release(now)
        # features of queries, parts and weights have been read
        tk.sync(BOTH_BARRIER, SIDES * tk.WARPGROUP)
        dv = s.dv[side * Int32(s.dv.stages // SIDES)]
        tk.store(dv, c.dv)
        tk.publish()
        tk.sync(SIDE_BARRIER + side, tk.WARPGROUP)
        if tk.warp_id() % WARPS == 0:
            tk.store_async(g.dv, dv, (t.batch, t.head, visited(t, i), side))
