"""The sides of the queries' kernel: the parts that have the state, and the gradients of features."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.features import LEAST
from tkq.linear_attention.hedgehog.sides import (
    FEATURES,
    SIDE_BARRIER,
    features_of_y,
    least,
    near_power,
    pairs_of_sums,
    put_features,
    put_state,
    side_softmax,
)
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.linear_attention.hedgehog.weights import following


@dataclass(frozen=True)
class Side:
    """Registers of one side's 64 features."""

    sum: tk.RegTile  # features by D
    dmap: tk.RegTile  # the map's gradient, transposed: its columns by half of D
    e: tk.RegTile
    d: tk.RegTile  # the features' gradients
    row: tk.RowVec
    inner: tk.RowVec
    far: tk.RowVec
    delta: tk.RowVec
    weight: tk.RowVec
    ones: tk.RowVec
    total: cute.Tensor  # of a feature of the first 64 threads each: the sum over tokens


class SidePart:
    """One side's 64 features by D, from the first chunk to the last, and what queries have of them."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def run(self, g, s, t, side):
        D = self.spec.head_dim
        c = Side(tk.rt_fl(D), tk.rt_fl(D // 2), tk.rt_fl(FEATURES), tk.rt_fl(FEATURES), *[tk.rv() for _ in range(6)],
                 cute.make_rmem_tensor((1,), Float32))
        tk.zero(c.sum)
        tk.zero(c.dmap)
        tk.fill(c.ones, 1.0)
        c.total[0] = Float32(0.0)
        less, _ = near_power(self.spec, g, t)
        scale = g.linear[t.head] * less * cutlass.select_(side == 0, Float32(1.0), Float32(-1.0))  # of -y: dy's sign
        tokens = s.queries.ring()  # one count for all pipes
        s.map_pipe.wait(s.map_pipe.ring())
        self.begin_y(s, c, tokens)
        tk.mma_wait(0)
        for i in cutlass.range(t.chunks, unroll=1):
            self.take_state(s, c, side, tokens)
            tk.load_rows(c.weight, g.inverse[t.batch, None, t.head], i * CHUNK, g.tokens)
            tk.mul(c.weight, c.weight, scale)
            self.put_gradients(s, c, side, tokens)
            self.add_keys(s, c, side, tokens, i)
            tokens.advance()
        _, power = near_power(self.spec, g, t)  # once more: a register less in the loop
        tk.mul(c.dmap, c.dmap, power)
        of_head = g.dmap[t.batch, t.head, None, None]
        transposed = cute.make_tensor(of_head.iterator, cute.select(of_head.layout, [1, 0]))
        tk.store_elements(transposed, c.dmap, 0, side * (D // 2))

    def begin_y(self, s, c, tokens):
        s.queries.wait(tokens)
        tk.mm_AB(c.e, s.x[tokens.stage], s.maps[0])

    @cute.jit
    def take_state(self, s, c, side, tokens):
        """delta, of the first side for the window, too; d = what a chunk has of the state, which is rounded; e: the
        softmax of its y."""
        one = tk.Ring(tokens.count, 1)
        s.gradients.wait(one)
        s.outputs.wait(one)
        tk.mm_ABt(c.d, s.o[0], s.a[0])
        put_state(s, c, side)
        tk.mma_wait(0)
        s.outputs.release(one)
        diagonal(c.delta, c.d)
        tk.mm_ABt(c.d, s.a[0], s.state[side])
        if side == 0:
            s.deltas.acquire_empty(one)
            tk.store_rows(s.delta[None, 0], c.delta, 0, CHUNK)
            s.deltas.commit(one)
        side_softmax(c, side)
        tk.mma_wait(0)
        s.gradients.release(one)

    @cute.jit
    def put_gradients(self, s, c, side, tokens):
        """dy and less of one side."""
        one = tk.Ring(tokens.count, 1)
        self.add_features(s, c, side)
        s.dys.acquire_empty(one)
        dy = tk.rt(FEATURES, self.dtype)
        tk.apply_narrow(dy, lambda z, d, weight, inner: z * cute.math.fma(d, weight, inner), c.e, c.d, c.weight,
                        c.inner)
        tk.store(s.dy[side], dy)
        tk.store_rows(s.less[None, side], c.far, 0, CHUNK)
        tk.publish()
        s.dys.commit(one)

    def add_features(self, s, c, side):
        """d: gradients of features; far: what they have of them; inner: what the softmax takes from each, with dy's
        weight."""
        sums = pairs_of_sums(s, side)
        tk.zero(c.inner)
        tk.zero(c.far)
        view, d = c.e.rows_view, c.d.rows_view
        for block in range(FEATURES // 8):
            cols = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(sums[None, 4 * block + tk.lane_id() % 4], cols)
            for r in range(2):
                for n in range(2):
                    j = 2 * block + n
                    one, found = view[r, j], d[r, j] - c.delta.tensor[r] * cols[n]
                    least = one < LEAST
                    feature = Float32(cutlass.select_(least, Float32(LEAST), one))
                    c.far.tensor[r] = cute.math.fma(feature, found, c.far.tensor[r])
                    d[r, j] = Float32(cutlass.select_(least, Float32(0.0), found))
                    c.inner.tensor[r] = cute.math.fma(one, d[r, j], c.inner.tensor[r])
        tk.quad_sum(c.inner)
        tk.quad_sum(c.far)
        tk.apply(c.inner, lambda x, weight: -x * weight, c.inner, c.weight)

    @cute.jit
    def add_keys(self, s, c, side, tokens, i):
        """The state takes up the chunk before; of the map's gradient half of the rows, of both sides' dy; the next
        chunk's y."""
        one, before = tk.Ring(tokens.count, 1), tk.Ring(tokens.count, s.keys.stages)
        s.keys.wait(before)
        tk.mm_AB(c.e, s.y[before.stage], s.maps[1])
        tk.mma_wait(0)
        s.keys.release(before)
        side_softmax(c, side)
        tk.apply(c.e, least, c.e)
        s.dys.wait(one)
        tk.mma_AtB(c.dmap, s.dy[0], s.x[tokens.stage], b_part=side)
        tk.mma_AtB(c.dmap, s.dy[1], s.x[tokens.stage], b_part=side)
        put_features(s, c, side, c.ones, i > 0)
        s.values.wait(before)
        tk.mma_AtB(c.sum, features_of_y(s, side), s.b[before.stage])
        self.begin_y(s, c, following(tokens))
        tk.mma_wait(2)
        s.dys.release(one)
        s.queries.release(tokens)
        tk.mma_wait(0)
        s.values.release(before)
        tk.sync(SIDE_BARRIER + side, tk.WARPGROUP)  # features and parts have been read


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
