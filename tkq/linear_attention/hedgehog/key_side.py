"""The sides of the keys' kernel: the state, the gradients of features, and the window's pairs."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.key_tiles import visited
from tkq.linear_attention.hedgehog.sides import (
    FEATURES,
    LEAST_NARROW,
    SIDE_BARRIER,
    features_of_y,
    near_power,
    pairs_of_sums,
    put_state,
)
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.linear_attention.hedgehog.weights import following
from tkq.linear_attention.hedgehog.window_rows import LN2, hide_later


@dataclass(frozen=True)
class Side:
    """Registers of one side's 64 features, and of a chunk's pairs with 64 queries."""

    sum: tk.RegTile  # features by D
    x: tk.RegTile  # features; scores
    d: tk.RegTile  # the features' gradients; dp
    most: tk.RowVec  # of no token: such rows weigh nothing
    inverse: tk.RowVec
    delta: tk.RowVec
    share: tk.RowVec
    scaled: tk.RowVec  # most, as an exponent of 2
    weight: tk.RowVec  # window * inverse
    inner: tk.RowVec


class SidePart:
    """One side's 64 features by D, from the last chunk to the first, what keys have of them, and their pairs with the
    queries of their own chunk, or, by the second side, with those of the chunk behind."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def run(self, g, s, t, side):
        c = Side(tk.rt_fl(self.spec.head_dim), tk.rt_fl(CHUNK), tk.rt_fl(FEATURES), *[tk.rv() for _ in range(7)])
        sums, numbers, thread = s.sums, s.behind, tk.thread_in_warpgroup()
        tk.zero(c.sum)
        if thread < FEATURES:
            sums[thread, side] = Float32(0.0)
            for n in cutlass.range_constexpr(2):
                numbers[thread, 2 * side + n] = Float32(0.0)
        less, _ = near_power(self.spec, g, t)
        scales = g.window[t.head], g.linear[t.head] * less
        tokens = s.keys.ring()  # one count for all pipes
        for i in cutlass.range(t.chunks, unroll=1):
            chunk = visited(t, i) + side
            self.put_gradients(s, c, side, tokens)
            self.ask(g, t, c, chunk)
            self.put_pairs(g, s, c, side, tokens, (chunk, scales[0]))
            self.add_queries(s, c, side, tokens, scales[1])
            tokens.advance()

    # ---- behind the window -----------------------------------------------------------------------

    @cute.jit
    def put_gradients(self, s, c, side, tokens):
        """The state, rounded, to shared memory; dy of one side."""
        one, f = tk.Ring(tokens.count, 1), tk.rt(FEATURES, self.dtype)
        # none is in flight, which the assembler does not see across branches: it would wait for all where sum is read
        tk.mma_wait(0)
        put_state(s, c, side)
        s.states.commit(one)
        s.values.wait(one)
        tk.mm_ABt(c.d, s.a[0], s.state[side])
        s.x_features.wait(one)
        tk.load(f, s.of_x[side])
        tk.copy(c.x, f)
        tk.mma_wait(0)
        s.read.commit(one)
        self.add_features(s, c, side)
        s.x_features.release(one)
        s.dys.acquire_empty(one)
        tk.store(s.dy[side], c.d)
        tk.publish()
        s.dys.commit(one)

    def add_features(self, s, c, side):
        """d: gradients of features, and then of y. Features at their least, which have no part in softmaxes, count as
        0."""
        sums, least = pairs_of_sums(s, side), LEAST_NARROW[self.spec.dtype]
        tk.zero(c.inner)
        view, d = c.x.rows_view, c.d.rows_view
        for block in range(FEATURES // 8):
            cols = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(sums[None, 4 * block + tk.lane_id() % 4], cols)
            for r in range(2):
                for n in range(2):
                    j = 2 * block + n
                    d[r, j] = d[r, j] - cols[n]
                    view[r, j] = Float32(cutlass.select_(view[r, j] <= least, Float32(0.0), view[r, j]))
                    c.inner.tensor[r] = cute.math.fma(view[r, j], d[r, j], c.inner.tensor[r])
        tk.quad_sum(c.inner)
        sign = cutlass.select_(side == 0, Float32(1.0), Float32(-1.0))
        for r in range(2):
            inner = c.inner.tensor[r] * sign
            for j in range(FEATURES // 4):
                d[r, j] = view[r, j] * cute.math.fma(d[r, j], sign, -inner)

    # ---- the window ------------------------------------------------------------------------------

    def ask(self, g, t, c, chunk):
        """Numbers of a chunk's queries, which come while products run."""
        for to, x in ((c.most, g.most), (c.inverse, g.inverse), (c.delta, g.delta), (c.share, g.share)):
            tk.load_rows(to, x[t.batch, None, t.head], chunk * CHUNK, g.tokens)

    @cute.jit
    def put_pairs(self, g, s, c, side, tokens, where):
        """P and ds of a chunk's keys."""
        (chunk, window), one, mine = where, tk.Ring(tokens.count, 1), following(tokens, 1 - side)
        s.keys.wait(tokens)
        s.queries.wait(mine)
        tk.mm_ABt(c.x, s.y[mine.stage], s.x[tokens.stage])
        s.gradients.wait(mine)
        tk.mm_ABt(c.d, s.b[mine.stage], s.a[0])
        scale, p, ds = g.scale * LN2, tk.rt(CHUNK, self.dtype), tk.rt(CHUNK, self.dtype)
        for r in cutlass.range_constexpr(2):
            there = chunk * CHUNK + tk.first_row() + 8 * r < g.tokens
            c.most.tensor[r] = cutlass.select_(there, c.most.tensor[r], Float32.inf)
            c.inverse.tensor[r] = cutlass.select_(there, c.inverse.tensor[r], Float32(0.0))
        tk.mul(c.scaled, c.most, g.scale)
        tk.mul(c.weight, c.inverse, window)
        tk.mul(c.inner, c.delta, -scale)
        tk.mul(c.share, c.share, scale)
        # for both: comparisons with the largest scores would be made before dp is there, and kept as bits
        tk.mma_wait(0)
        s.keys.release(tokens)
        s.queries.release(tokens)
        s.values.release(one)
        if side == 0:
            hide_later(c.x)

        def both(score, d, most, scaled, weight, less, share):
            e = cute.math.exp2(cute.math.fma(score, g.scale, -scaled), fastmath=True) * weight
            taken = cutlass.select_(score == most, share, Float32(0.0))
            return e, cute.math.fma(e, cute.math.fma(d, scale, less), -taken)

        tk.apply_narrow((p, ds), both, c.x, c.d, c.most, c.scaled, c.weight, c.inner, c.share)
        s.pairs.acquire_empty(one)
        tk.store(s.p[side], p)
        tk.store(s.ds[side], ds)
        tk.publish()
        s.pairs.commit(one)

    # ---- the state -------------------------------------------------------------------------------

    @cute.jit
    def add_queries(self, s, c, side, tokens, scale):
        """The state and sums take up the chunk behind, whose numbers the second side has, and the first had a chunk
        before."""
        one, f = tk.Ring(tokens.count, 1), tk.rt(CHUNK, self.dtype)
        numbers, weights, deltas = s.behind, tk.cv(CHUNK), tk.cv(CHUNK)
        tk.mul(c.weight, c.inverse, scale)
        if side == 1:
            self.put_numbers(numbers, c, side)
        tk.sync(SIDE_BARRIER + side, tk.WARPGROUP)  # they are there; sums have been read
        s.y_features.wait(one)
        tk.load_T(f, features_of_y(s, side))
        for n, to in ((0, weights), (1, deltas)):
            tk.load_shared_cols(to, numbers[None, 2 * side + n])
        tk.copy(c.x, f)
        tk.mul_col(c.x, c.x, weights)
        tk.copy(f, c.x)
        s.gradients.wait(tokens)
        tk.mma_AB(c.sum, f, s.b[tokens.stage])
        dot_columns(c.inner, c.x, deltas)
        add_rows(s.sums, c.inner, side)
        tk.mma_wait(0)
        s.gradients.release(tokens)
        s.y_features.release(one)
        tk.sync(SIDE_BARRIER + side, tk.WARPGROUP)  # numbers and features have been read
        if side == 0:
            self.put_numbers(numbers, c, side)

    def put_numbers(self, numbers, c, side):
        """Weights and deltas."""
        for n, vector in ((0, c.weight), (1, c.delta)):
            tk.store_rows(numbers[None, 2 * side + n], vector, 0, CHUNK)


def dot_columns(v: tk.RowVec, x: tk.RegTile, cols: tk.ColVec):
    """v[i] = sum of x[i, j] cols[j]. Whole warps."""
    tk.zero(v)
    view = x.rows_view
    for r in range(2):
        for j in range(x.cols // 4):
            v.tensor[r] = cute.math.fma(view[r, j], cols.tensor[j], v.tensor[r])
    tk.quad_sum(v)


@cute.jit
def add_rows(sums, v: tk.RowVec, side):
    """sums[i, side] += v[i]."""
    found = v.tensor
    if tk.lane_id() % 4 == 0:
        for r in cutlass.range_constexpr(2):
            at = tk.first_row() + 8 * r
            sums[at, side] = sums[at, side] + found[r]
