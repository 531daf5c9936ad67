"""The gradients of Hedgehog's queries: the part that makes them, before the window and in it."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.feature_gradients import GRADIENTS_BARRIER, Gradient, GradientPart, make_gradient
from tkq.linear_attention.hedgehog.feature_tiles import near_power
from tkq.linear_attention.hedgehog.features import softmax
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.spec import FeatureSpec
from tkq.linear_attention.hedgehog.weights import following
from tkq.linear_attention.hedgehog.window_rows import Rows, factors_of, make_rows, numbers, of_scores, sums
from tkq.tile import vectors
from tkq.tile.assembly import opaque_sum

LANES, VECTOR = 4, 8  # threads that have a row, and the neighbours that each has of it


@dataclass(frozen=True)
class Window:
    """Registers of a chunk's pairs: scores and products of do and v, of its own keys and of the chunk's before."""

    now: tk.RegTile
    past: tk.RegTile
    dp_now: tk.RegTile
    dp_past: tk.RegTile
    rows: Rows


def anew(t: Task) -> Task:
    """The same, of which the compiler knows nothing: it makes addresses of it where they are used, in each chunk, as
    there are no registers to keep them."""
    batch, head = (Int32(opaque_sum(Int64(x), Int64(0))) for x in (t.batch, t.head))
    return Task(batch, head, t.chunks)


class QueryPart:
    """Of 64 tokens after the others: features' gradients as `feature_gradients.GradientPart` has them, then the
    window's, then dq of both."""

    def __init__(self, spec: FeatureSpec, dtype: Any):
        self.spec, self.dtype, self.features = spec, dtype, GradientPart(spec, dtype)

    @cute.jit
    def run(self, g, s, t):
        c = make_gradient(self.spec, self.dtype)
        w = Window(*[tk.rt_fl(CHUNK) for _ in range(4)], make_rows())
        less, power = near_power(self.spec, g, t)
        scale, powers = g.linear[t.head] * less, s.power
        powers[tk.thread_in_warpgroup() % 4, 0] = power
        tk.sync(GRADIENTS_BARRIER, tk.WARPGROUP)
        tokens = s.tokens.ring()  # of others and values, too
        one = tk.Ring(tokens.count, 1)  # one count for all
        s.map_pipe.wait(s.map_pipe.ring())
        self.features.begin_y(s, c, tokens)
        self.prefetch_outputs(g, t, 0)
        tk.mma_wait(0)
        for i in cutlass.range(t.chunks, unroll=1):
            self.add_features(g, s, t, c, one, (i, scale))
            self.make_scores(g, s, t, c, w, (tokens, one), i)
            self.put_all(g, s, c, tokens, (t.batch, t.head, i, 0))
            tokens.advance()
        tk.store_wait(read=False)

    # ---- before the window ---------------------------------------------------------------------

    @cute.jit
    def add_features(self, g, s, t, c: Gradient, one, chunk):
        """dy, to shared memory; delta and less, to global memory, too."""
        i, scale = chunk
        here = anew(t)
        tk.load_rows(c.inverse, g.inverse[here.batch, None, here.head], i * CHUNK, g.tokens)
        self.row_dots(g, t, c, i)
        s.outputs.wait(one)
        s.states.wait(one)
        for side in cutlass.range_constexpr(2):
            tk.mm_ABt(c.d[side], s.a[one.stage], s.state[side])
        self.prefetch_outputs(g, t, i + 1)
        softmax(c.e, c.row, c.y, 1.0)
        tk.mma_wait(0)
        tk.zero(c.far)
        self.features.add_side(s, c, c.e, 0, i)
        softmax(c.y, c.row, c.y, -1.0)
        self.features.add_side(s, c, c.y, 1, i)
        s.states.release(one)
        self.features.put_less(g, t, c, i)
        tk.mul(c.row, c.inverse, scale)
        tk.apply_narrow(c.dy, lambda d, w: d * w, c.d[0], c.row)
        s.dys.acquire_empty(one)
        tk.store(s.dy[0], c.dy)
        tk.publish()
        s.dys.commit(one)

    @cute.jit
    def row_dots(self, g, t, c: Gradient, i):
        """delta = o do. A row's four threads take pieces of 16 bytes in turns, straight from global memory."""
        here = anew(t)
        for r in cutlass.range_constexpr(2):
            token = cutlass.min(i * CHUNK + tk.first_row() + 8 * r, g.tokens - 1)
            c.delta.tensor[r] = self.row_dot(g, here, token)
        tk.quad_sum(c.delta)
        tk.store_rows(g.delta[here.batch, None, here.head], c.delta, i * CHUNK, g.tokens)

    def prefetch_outputs(self, g, t, i):
        """Of a chunk that is to come: nothing else brings them. Half a row of each thread."""
        here, thread = anew(t), tk.thread_in_warpgroup()
        token = cutlass.min(i * CHUNK + thread // 2, g.tokens - 1)
        at = here.batch, token, here.head, thread % 2 * (self.spec.head_dim // 2)
        vectors.prefetch(vectors.run_at(g.o, at, VECTOR))

    def row_dot(self, g, here, token):
        """This thread's part of a row's."""
        total = Float32(0.0)
        for n in range(self.spec.head_dim // (VECTOR * LANES)):
            at = here.batch, token, here.head, VECTOR * (LANES * n + tk.lane_id() % LANES)
            for o, do in zip(*(vectors.wide(vectors.load(vectors.run_at(m, at, VECTOR))) for m in (g.o, g.do))):
                total = cute.math.fma(o, do, total)
        return total

    # ---- the window ----------------------------------------------------------------------------

    def past_stage(self, tokens, i):
        """Of the keys of the chunk before; of the first chunk its own, whose values are there."""
        return Int32(cutlass.select_(i == 0, tokens.stage, tokens.stage ^ 1))

    @cute.jit
    def make_scores(self, g, s, t, c: Gradient, w: Window, rings, i):
        """ds of both chunks to shared memory, the factors' gradients to global memory."""
        (tokens, one), rows, past = rings, w.rows, self.past_stage(rings[0], i)
        s.others.wait(tokens)
        tk.mm_ABt(w.now, s.x[tokens.stage], s.y[tokens.stage])
        tk.mm_ABt(w.past, s.x[tokens.stage], s.y[past])
        s.values.wait(tokens)
        tk.mm_ABt(w.dp_now, s.a[one.stage], s.b[tokens.stage])
        tk.mm_ABt(w.dp_past, s.a[one.stage], s.b[past])
        for to, x in ((rows.inverse, c.inverse), (rows.delta, c.delta), (rows.far_do, c.far)):
            tk.copy(to, x)
        tk.mma_wait(2)
        s.tokens.release(tokens)
        tk.right_fill(w.now, 1, -Float32.inf, diagonal=True)
        tk.row_max(rows.most, w.now)
        if i == 0:
            tk.neg_infty(w.past)
        tk.row_max(rows.most, w.past, rows.most)
        tk.mma_wait(0)
        s.outputs.release(one)
        if i > 0:
            s.values.release(following(tokens, -1))
        sums(rows, ((w.now, w.dp_now), (w.past, w.dp_past)), g.scale * tk.LOG2E)
        here = anew(t)
        numbers(rows, (g.linear[here.head], g.window[here.head]), factors_of(g, here, i))
        if tk.warp_id() % 4 == 0:
            tk.store_wait()
        tk.sync(GRADIENTS_BARRIER, tk.WARPGROUP)  # dq of the chunk before has left their room; dy is there
        for n, x, dp in ((0, w.now, w.dp_now), (1, w.past, w.dp_past)):
            narrow = tk.rt(CHUNK, self.dtype)
            of_scores(narrow, x, dp, rows, g.scale)
            tk.store(s.ds[n], narrow)
        tk.publish()
        tk.sync(GRADIENTS_BARRIER, tk.WARPGROUP)

    @cute.jit
    def put_all(self, g, s, c: Gradient, tokens, at):
        """dq to global memory, and the next chunk's y meanwhile."""
        i, y = at[2], s.y
        tk.mm_ABt(c.dx, s.dy[0], s.maps[0])
        if cutlass.const_expr(self.spec.dtype != "bf16"):
            tk.mma_wait(0)
            tk.mul(c.dx, c.dx, s.power[0, 0])
        tk.mma_AB(c.dx, s.ds[0], y[tokens.stage])
        tk.mma_AB(c.dx, s.ds[1], y[self.past_stage(tokens, i)])
        self.features.begin_y(s, c, following(tokens))
        tk.mma_wait(1)
        if i > 0:
            s.others.release(following(tokens, -1))
        tk.sync(GRADIENTS_BARRIER, tk.WARPGROUP)  # ds has been read
        self.features.put(g.dx, s.out[0], c.dx, at)
        tk.mma_wait(0)
