"""The sides of the queries' kernel: the state, the gradients of features, and half of dq."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.query_deltas import take
from tkq.linear_attention.hedgehog.query_tiles import DELTA, INVERSE
from tkq.linear_attention.hedgehog.sides import (
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


@dataclass(frozen=True)
class Side:
    """Registers of one side's 64 features, and of half of D."""

    sum: tk.RegTile  # features by D
    dmap: tk.RegTile  # the map's gradient, transposed: its columns by half of D
    x: tk.RegTile  # features; sums
    d: tk.RegTile  # the features' gradients
    dq: tk.RegTile  # of half of D
    delta: tk.RowVec
    weight: tk.RowVec
    inner: tk.RowVec
    far: tk.RowVec  # less


class SidePart:
    """One side's 64 features by D, from the first chunk to the last, what queries have of them, and half of the columns
    of dq."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def run(self, g, s, t, side):
        D, d, sums = self.spec.head_dim, tk.rt_fl(FEATURES), s.sums
        dq = d if D == SIDES * FEATURES else tk.rt_fl(D // SIDES)  # a product's registers are taken also before it
        c = Side(tk.rt_fl(D), tk.rt_fl(D // SIDES), tk.rt_fl(FEATURES), d, dq, *[tk.rv() for _ in range(4)])
        tk.zero(c.sum)
        tk.zero(c.dmap)
        if tk.thread_in_warpgroup() < FEATURES:
            sums[tk.thread_in_warpgroup(), side] = Float32(0.0)
        powers, (less, power) = s.power, near_power(self.spec, g, t)
        if tk.thread_in_warpgroup() == 0:
            powers[side] = power  # read behind the barrier of `put_state`
        scale = g.linear[t.head] * less * cutlass.select_(side == 0, Float32(1.0), Float32(-1.0))  # of -y: dy's sign
        tokens = s.queries.ring()  # one count for all pipes
        s.map_pipe.wait(s.map_pipe.ring())
        s.keys.wait(s.keys.ring())
        for i in cutlass.range(t.chunks, unroll=1):
            self.take_state(g, s, t, c, side, (tokens, i))
            tk.mul(c.weight, c.weight, scale)
            self.put_gradients(s, c, side, tokens)
            self.begin_queries(s, c, side, tokens)
            self.add_keys(s, c, side, tokens)
            self.put_queries(s, c, side, tokens)
            tokens.advance()
        tk.publish()
        tk.sync(SIDE_BARRIER + side, tk.WARPGROUP)
        self.send(g, s, t, side, tokens)
        if tk.first_warp_of_group():
            tk.store_wait(read=False)
        _, power = near_power(self.spec, g, t)  # once more: a register less in the loop
        tk.mul(c.dmap, c.dmap, power)
        of_head = g.dmap[t.batch, t.head, None, None]
        transposed = cute.make_tensor(of_head.iterator, cute.select(of_head.layout, [1, 0]))
        tk.store_elements(transposed, c.dmap, 0, side * (D // SIDES))

    # ---- before the window -----------------------------------------------------------------------

    @cute.jit
    def take_state(self, g, s, t, c, side, where):
        """d = what a chunk has of the state, which is rounded; x: features. dq of the chunk before leaves."""
        (tokens, i), f = where, tk.rt(FEATURES, self.dtype)
        one = tk.Ring(tokens.count, 1)
        # none is in flight, which the assembler does not see across branches: it would wait for all where sum is read
        tk.mma_wait(0)
        put_state(s, c, side)
        s.gradients.wait(one)
        tk.mm_ABt(c.d, s.a[0], s.state[side])
        if i > 0:
            self.send(g, s, t, side, tokens)
        s.x_features.wait(one)
        tk.load(f, s.of_x[side])
        tk.copy(c.x, f)
        s.deltas.wait(one)
        take(s, c.delta, DELTA)
        take(s, c.weight, INVERSE)
        tk.mma_wait(0)
        s.deltas.release(one)
        s.states.commit(one)
        s.gradients.release(one)
        s.x_features.release(one)

    @cute.jit
    def put_gradients(self, s, c, side, tokens):
        """dy and less of one side; the queries of the chunk before are done with, once dq has left by their room."""
        one, dy = tk.Ring(tokens.count, 1), tk.rt(FEATURES, self.dtype)
        self.add_features(s, c, side)
        s.dys.acquire_empty(one)
        tk.apply_narrow(dy, lambda z, d, weight, inner: z * cute.math.fma(d, weight, inner), c.x, c.d, c.weight,
                        c.inner)
        tk.store(s.dy[side], dy)
        tk.store_rows(s.less[None, side], c.far, 0, CHUNK)
        tk.publish()
        s.dys.commit(one)
        if tokens.count[0] > 0:
            if tk.first_warp_of_group():
                tk.store_wait()
            s.queries.release(following(tokens, -1))

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
        tk.quad_sum(c.far)
        tk.apply(c.inner, lambda x, weight: -x * weight, c.inner, c.weight)

    # ---- queries ---------------------------------------------------------------------------------

    @cute.jit
    def begin_queries(self, s, c, side, tokens):
        """Of half of D the map's gradient and dq, of both sides' dy."""
        s.queries.wait(tokens)
        s.dys.wait(tk.Ring(tokens.count, 1))
        for n in range(SIDES):
            if const_expr(self.spec.head_dim == 2 * CHUNK):  # a tile of its own, which this side alone writes dq over
                tk.mma_AtB(c.dmap, s.dy[n], self.half(s, side, tokens))
            else:
                tk.mma_AtB(c.dmap, s.dy[n], s.x[tokens.stage], b_part=side)
        tk.mm_ABt(c.dq, s.dy[0], s.x_map[0], b_part=side)
        tk.mma_ABt(c.dq, s.dy[1], s.x_map[0], b_part=side)
        if const_expr(self.spec.dtype != "bf16"):
            tk.mma_wait(0)
            tk.mul(c.dq, c.dq, s.power[side])

    @cute.jit
    def add_keys(self, s, c, side, tokens):
        """The state takes up the chunk before; x: what its sums do, `put_queries` waits for both."""
        before, ones = tk.Ring(tokens.count, s.values.stages), tk.rt(CHUNK, self.dtype)
        tk.fill(ones, 1.0)
        s.y_features.wait(tk.Ring(tokens.count, 1))
        s.values.wait(before)
        tk.mma_AtB(c.sum, features_of_y(s, side), s.b[before.stage])
        tk.mm_AB(c.x, ones, features_of_y(s, side))

    @cute.jit
    def put_queries(self, s, c, side, tokens):
        """dq, with the window's, which takes the place of its queries."""
        one, before = tk.Ring(tokens.count, 1), tk.Ring(tokens.count, s.keys.stages)
        now = following(before)
        s.keys.wait(now)
        s.pairs.wait(one)
        tk.mma_AB(c.dq, s.ds[0], s.y[now.stage], b_part=side)
        tk.mma_AB(c.dq, s.ds[1], s.y[before.stage], b_part=side)
        tk.mma_wait(4)
        s.dys.release(one)
        tk.mma_wait(2)
        s.values.release(tk.Ring(tokens.count, s.values.stages))
        s.y_features.release(one)
        tk.mma_wait(0)
        s.pairs.release(one)
        s.keys.release(before)
        tk.sync(SIDE_BARRIER + side, tk.WARPGROUP)  # features, sums, and half of the queries have been read
        add_sums(s.sums, c.x, side)
        tk.store(self.half(s, side, tokens), c.dq)

    def half(self, s, side, tokens):
        """Where half of dq lies; of 128 columns half of its queries until then."""
        return s.out[SIDES * tokens.stage + side]

    @cute.jit
    def send(self, g, s, t, side, tokens):
        """dq of the chunk before, after a barrier that all of the side have met at."""
        last = following(tokens, -1)
        if tk.first_warp_of_group():
            tk.store_async(g.dx, self.half(s, side, last), (t.batch, t.head, Int32(last.count[0]), side))
