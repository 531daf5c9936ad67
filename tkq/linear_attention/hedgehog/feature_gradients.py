"""The gradients of the features' kernel: the part that makes them of what the state gives."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.feature_tiles import FEATURES, SIDES, near_power, visited
from tkq.linear_attention.hedgehog.features import LEAST, softmax
from tkq.linear_attention.hedgehog.spec import FeatureSpec
from tkq.linear_attention.hedgehog.weights import following
from tkq.linear_attention.hedgehog.window_kernel import put

GRADIENTS_BARRIER = 3  # the named barrier of the warpgroup


@dataclass(frozen=True)
class Gradient:
    """Registers of 64 tokens."""

    y: tk.RegTile
    e: tk.RegTile
    d: tuple  # gradients of the features of y, of -y; the first becomes that of y
    dy: tk.RegTile  # rounded: an operand
    of_x: tuple  # features, rounded: operands
    dx: tk.RegTile
    dv: tk.RegTile
    row: tk.RowVec
    inner: tk.RowVec
    inverse: tk.RowVec
    delta: tk.RowVec
    far: tk.RowVec


class GradientPart:
    """Of 64 tokens after the others: dx, of keys dv, of queries the linear factor's."""

    def __init__(self, spec: FeatureSpec, dtype: Any):
        self.spec, self.dtype, self.keys = spec, dtype, spec.of == "keys"

    @cute.jit
    def run(self, g, s, t):
        D, dtype = self.spec.head_dim, self.dtype
        c = Gradient(tk.rt_fl(FEATURES), tk.rt_fl(FEATURES), tuple(tk.rt_fl(FEATURES) for _ in range(SIDES)),
                     tk.rt(FEATURES, dtype), tuple(tk.rt(FEATURES, dtype) for _ in range(SIDES)), tk.rt_fl(D),
                     tk.rt_fl(D), *[tk.rv() for _ in range(5)])
        less, power = near_power(self.spec, g, t)
        scale, powers = g.linear[t.head] * less, s.power
        powers[tk.thread_in_warpgroup() % 4, 0] = power
        tk.sync(GRADIENTS_BARRIER, tk.WARPGROUP)
        tokens = s.tokens.ring()
        states, dys = (tk.Ring(tokens.count, pipe.stages) for pipe in (s.states, s.dys))  # one count for all
        s.map_pipe.wait(s.map_pipe.ring())
        if const_expr(not self.keys):
            self.begin_y(s, c, tokens)
            tk.mma_wait(0)
        for i in cutlass.range(t.chunks, unroll=1):
            chunk = visited(self.spec, t, i)
            if const_expr(not self.keys):
                tk.load_rows(c.inverse, g.inverse[t.batch, None, t.head], chunk * CHUNK, g.tokens)
                tk.load_rows(c.delta, g.delta[t.batch, None, t.head], chunk * CHUNK, g.tokens)
            if const_expr(self.keys):
                self.release(s, tokens, i)
                self.begin_y(s, c, tokens)
            s.states.wait(states)
            for side in cutlass.range_constexpr(SIDES):
                tk.mm_ABt(c.d[side], s.a[tokens.stage], s.state[side])
            if const_expr(self.keys):
                tk.mma_wait(2)
            softmax(c.e, c.row, c.y, self.sign(1.0))
            tk.mma_wait(0)
            if const_expr(not self.keys):
                s.tokens.release(tokens)
            tk.zero(c.far)
            self.add_side(s, c, c.e, 0, i)
            softmax(c.y, c.row, c.y, self.sign(-1.0))
            self.add_side(s, c, c.y, 1, i)
            if const_expr(self.keys):
                tk.copy(c.dy, c.d[0])
                tk.mm_AB(c.dv, c.of_x[0], s.state[0])
                tk.mma_AB(c.dv, c.of_x[1], s.state[1])
            else:
                s.states.release(states)
                self.put_less(g, t, c, chunk)
                tk.mul(c.inverse, c.inverse, scale)
                tk.apply_narrow(c.dy, lambda d, w: d * w, c.d[0], c.inverse)
            s.dys.acquire_empty(dys)
            tk.store(s.dy[0], c.dy)
            tk.publish()
            s.dys.commit(dys)
            self.put_all(g, s, c, (tokens, states), (t.batch, t.head, chunk, 0))
            tokens.advance()
        tk.store_wait(read=False)

    def sign(self, x):
        """Of keys, whose gradients have fewer registers left, not known before: in steps, which take fewer."""
        return Float32(x) if self.keys else x

    def begin_y(self, s, c, tokens):
        s.tokens.wait(tokens)
        tk.mm_AB(c.y, s.x[tokens.stage], s.maps[0])

    @cute.jit
    def put_all(self, g, s, c, rings, at):
        """dx and dv to global memory; of queries the next chunk's y meanwhile, for which keys have no registers."""
        tokens, states = rings
        if const_expr(self.keys):
            tk.mma_wait(0)
            s.states.release(states)
            self.by_power(s, c.dv)
            if tk.warp_id() % 4 == 0:
                tk.store_wait()
            tk.sync(GRADIENTS_BARRIER, tk.WARPGROUP)  # values have been read, dx of the chunk before has left
            self.put(g.dv, s.a[tokens.stage], c.dv, at)
        tk.mm_ABt(c.dx, c.dy, s.maps[0])
        if const_expr(not self.keys):
            self.begin_y(s, c, following(tokens))
        tk.mma_wait(0 if self.keys else 1)
        self.by_power(s, c.dx)
        if const_expr(self.keys):
            self.put(g.dx, s.out[0], c.dx, at)
        else:
            put(g.dx, s.out[0], c.dx, at, GRADIENTS_BARRIER)
            tk.mma_wait(0)

    def by_power(self, s, x):
        # by 1 in bfloat16: of 64 columns two registers are spilled without it
        if self.spec.dtype != "bf16" or self.spec.head_dim == FEATURES:
            tk.mul(x, x, s.power[0, 0])

    @cute.jit
    def put(self, to, tile, x, at):
        """Rows through a shared tile that is free."""
        tk.store(tile, x)
        tk.publish()
        tk.sync(GRADIENTS_BARRIER, tk.WARPGROUP)
        if tk.warp_id() % 4 == 0:
            tk.store_async(to, tile, at)

    @cute.jit
    def release(self, s, tokens, i):
        """Of keys, tokens of the chunk before, once dv has left the room of its values: all warps have met since, so
        that the one that stored it can tell."""
        if i > 0 and tk.warp_id() % 4 == 0:
            tk.store_wait(1)
            s.tokens.release(following(tokens, -1))

    def add_side(self, s, c, e, side, i):
        """d[0] becomes y's gradient, of the features e of one side; far += what they have of it, before they are
        divided by anything."""
        sums = s.sums[None, i % 2 * SIDES + side]
        sums = cute.make_tensor(sums.iterator, cute.make_layout((2, FEATURES // 2)))
        tk.zero(c.inner)
        view, d, first = e.rows_view, c.d[side].rows_view, c.d[0].rows_view
        for block in range(FEATURES // 8):
            cols = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(sums[None, 4 * block + tk.lane_id() % 4], cols)
            for r in range(2):
                for n in range(2):
                    j, col = 2 * block + n, cols[n]
                    one, found = view[r, j], d[r, j] - (col if self.keys else c.delta.tensor[r] * col)
                    least = one < LEAST
                    if not self.keys:
                        feature = Float32(cutlass.select_(least, Float32(LEAST), one))
                        c.far.tensor[r] = cute.math.fma(feature, found, c.far.tensor[r])
                    d[r, j] = Float32(cutlass.select_(least, Float32(0.0), found))
                    c.inner.tensor[r] = cute.math.fma(one, d[r, j], c.inner.tensor[r])
        tk.quad_sum(c.inner)
        for r in range(2):
            for j in range(FEATURES // 4):
                of_y = view[r, j] * (d[r, j] - c.inner.tensor[r])
                first[r, j] = first[r, j] - of_y if side else of_y
        if self.keys:
            tk.apply_narrow(c.of_x[side], lambda z: cutlass.select_(z < LEAST, Float32(LEAST), z), e)

    def put_less(self, g, t, c, chunk):
        """What the factors' gradients begin with, of each token."""
        tk.quad_sum(c.far)
        tk.store_rows(g.less[t.batch, None, t.head], c.far, chunk * CHUNK, g.tokens)
