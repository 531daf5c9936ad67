"""The weights of Hedgehog's kernel: the part that makes those in the window, and features."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Uint32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.features import add_row, make_features
from tkq.linear_attention.hedgehog.segments import Segments
from tkq.linear_attention.hedgehog.spec import HedgehogSpec

WEIGHTS_BARRIER = 1  # the named barrier of the warpgroup
EPS = 1e-6  # of the denominator
ONES = 8  # columns that features are multiplied by to add them up: the fewest that a product has


@dataclass(frozen=True)
class Weights:
    """Registers of the weights' warpgroup: 64 tokens."""

    now: tk.RegTile  # scores of the chunk's own keys
    past: tk.RegTile  # of those of the chunk before
    y_q: tk.RegTile
    y_k: tk.RegTile
    e: tk.RegTile
    sums: tuple  # features of a chunk's keys by ones, of y, of -y: each column is their sum
    ones: tk.RegTile
    most: tk.RowVec
    total: tk.RowVec
    far: tk.RowVec  # what the state adds to denominators
    row: tk.RowVec


class WeightsPart:
    """Of a chunk's 64 queries; of "states" features of keys alone."""

    def __init__(self, spec: HedgehogSpec, dtype: Any, segments: Segments):
        self.spec, self.dtype, self.segments = spec, dtype, segments

    def of_queries(self, s, tokens, weights):
        """Features of a chunk's queries: (of y, of -y)."""
        first = 2 * (tokens.stage if self.spec.in_place else weights.stage)
        return s.of_q[first], s.of_q[first + 1]

    def of_keys(self, s, keys, weights):
        """Those of the chunk before."""
        first = 2 * (keys.stage if self.spec.in_place else weights.stage)
        return s.of_k[first], s.of_k[first + 1]

    @cute.jit
    def run(self, g, s, t):
        F = self.spec.features
        now, past = tk.rt_fl(CHUNK), tk.rt_fl(CHUNK)
        # a product's registers are taken also before it: as few as can be
        of_maps = (now, past) if F == CHUNK else (tk.rt_fl(F), tk.rt_fl(F))
        w = Weights(now, past, *of_maps, tk.rt_fl(F), (tk.rt_fl(ONES), tk.rt_fl(ONES)), tk.rt(CHUNK, self.dtype),
                    *[tk.rv() for _ in range(4)])
        if const_expr(self.segments.states):
            self.make_features(g, s, t, w)
        else:
            self.make_weights(g, s, t, w)

    @cute.jit
    def make_features(self, g, s, t, w):
        """Of keys, and their sums, alone."""
        sums = s.sums
        self.begin_sums(s)
        self.segments.begin_sums(g, t, sums)
        keys, out = s.keys.ring(), s.weights.ring()
        s.map_pipe.wait(s.map_pipe.ring())
        for _ in cutlass.range(t.chunks, unroll=1):
            s.keys.wait(keys)
            tk.mm_AB(w.y_k, s.k[keys.stage], s.maps[1])
            s.weights.acquire_empty(out)
            tk.mma_wait(0)
            tk.sync(WEIGHTS_BARRIER, tk.WARPGROUP)  # keys have been read
            make_features(w, w.y_k, self.of_keys(s, keys, out))
            tk.publish()
            s.weights.commit(out)
            tk.sync(WEIGHTS_BARRIER, tk.WARPGROUP)
            self.add_features(s, w, self.of_keys(s, keys, out), True)
            s.keys.release(keys)
            keys.advance()
            out.advance()
        tk.sync(WEIGHTS_BARRIER, tk.WARPGROUP)
        self.segments.end_sums(g, t, sums)

    @cute.jit
    def make_weights(self, g, s, t, w):
        sums = s.sums
        self.begin_sums(s)
        self.segments.begin_sums(g, t, sums)
        linear, window = g.linear[t.head], g.window[t.head]
        out = s.weights.ring()
        tokens, before = (tk.Ring(out.count, x.stages) for x in (s.tokens, s.keys))  # one count for all
        s.map_pipe.wait(s.map_pipe.ring())
        s.keys.wait(before)
        for i in cutlass.range(t.first, t.first + t.chunks, unroll=1):
            keys = following(before)
            s.tokens.wait(tokens)
            s.keys.wait(keys)
            tk.mm_ABt(w.now, s.q[tokens.stage], s.k[keys.stage])
            tk.mm_ABt(w.past, s.q[tokens.stage], s.k[before.stage])
            self.softmax(g, t, w, i)
            s.weights.acquire_empty(out)
            self.put_weights(w, w.now, s.p[2 * out.stage], window)
            tk.mm_AB(w.y_q, s.q[tokens.stage], s.maps[0])
            self.put_weights(w, w.past, s.p[2 * out.stage + 1], window)
            tk.mm_AB(w.y_k, s.k[before.stage], s.maps[1])
            tk.mma_wait(1)
            # queries have been read, and the sums of the chunk before are there
            tk.sync(WEIGHTS_BARRIER, tk.WARPGROUP)
            tk.zero(w.far)
            make_features(w, w.y_q, self.of_queries(s, tokens, out), sums)
            tk.mma_wait(0)
            tk.sync(WEIGHTS_BARRIER, tk.WARPGROUP)  # keys have been read
            make_features(w, w.y_k, self.of_keys(s, before, out))
            self.put_denominators(g, s, t, w, (i, out.stage), (linear, window))
            tk.publish()
            s.weights.commit(out)
            tk.sync(WEIGHTS_BARRIER, tk.WARPGROUP)
            self.send(g, t, self.of_queries(s, tokens, out), self.of_keys(s, before, out), i)
            self.add_features(s, w, self.of_keys(s, before, out), i > 0)
            self.sent(True)
            s.tokens.release(tokens)
            s.keys.release(before)
            out.advance()
        # the last chunk's keys leave the window for no query
        self.sent(False)

    @cute.jit
    def send(self, g, t, of_queries, of_keys, i):
        """Features of a chunk's queries and of the keys before leave from where they are multiplied."""
        if const_expr(self.spec.keeps):
            if tk.first_warp_of_group():
                for part in cutlass.range_constexpr(2):
                    tk.store_async(g.q_features, of_queries[part], (t.batch, t.head, i, part))
                    if i > 0:
                        tk.store_async(g.k_features, of_keys[part], (t.batch, t.head, i - 1, part))

    @cute.jit
    def sent(self, read: Constexpr[bool]):
        """They have been read, or written: to the warp that sent them."""
        if const_expr(self.spec.keeps):
            if tk.first_warp_of_group():
                tk.store_wait(read=read)

    @cute.jit
    def softmax(self, g, t, w, i):
        """now, past = the window's exponentials, of scores that are waited for here; total = a thread's part of their
        sums. The largest score of each token goes to global memory."""
        tk.mma_wait(1)
        tk.right_fill(w.now, 1, -Float32.inf, diagonal=True)
        tk.row_max(w.most, w.now)
        tk.mma_wait(0)
        if i == 0:
            tk.neg_infty(w.past)
        tk.row_max(w.most, w.past, w.most)
        tk.store_rows(g.most[t.batch, None, t.head], w.most, i * CHUNK, g.tokens)
        tk.mul(w.most, w.most, g.scale)
        for x in (w.now, w.past):
            view = x.rows_view
            for r in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(CHUNK // 4):
                    view[r, j] = cute.math.exp2(view[r, j] * g.scale - w.most.tensor[r], fastmath=True)
        tk.row_sum_partial(w.total, w.now)
        tk.row_sum_partial(w.total, w.past, w.total)

    def put_weights(self, w, x, tile, window):
        p = tk.rt(CHUNK, self.dtype)
        tk.apply_narrow(p, lambda e: e * window, x)
        tk.store(tile, p)

    def put_denominators(self, g, s, t, w, where, factors):
        (chunk, stage), (linear, window) = where, factors
        tk.apply(w.row, lambda near, far: window * near + linear * far, w.total, w.far)
        tk.quad_sum(w.row)
        tk.apply(w.row, lambda x: cute.arch.rcp_approx(x + EPS), w.row)
        tk.store_rows(s.inverse[None, stage], w.row, 0, CHUNK)
        tk.store_rows(g.inverse[t.batch, None, t.head], w.row, chunk * CHUNK, g.tokens)

    def begin_sums(self, s):
        each = ONES * CHUNK // tk.WARPGROUP
        for n in range(each):
            at = each * tk.thread_in_warpgroup() + n
            s.ones[0].tensor[at // CHUNK, at % CHUNK] = self.dtype(1.0)
        tk.publish()

    @cute.jit
    def add_features(self, s, w, tiles, there):
        """sums += a chunk's features of keys, by a product with ones: each of its columns is that sum, or, of 32
        features, fewer than a product has rows, each row of another. there: is there such a chunk?"""
        sums = s.sums
        if const_expr(self.spec.features == CHUNK):
            for part in cutlass.range_constexpr(2):
                tk.mm_AtBt(w.sums[part], tiles[part], s.ones[0])
            tk.mma_wait(0)
            if there and tk.lane_id() % 4 == 0:
                for part, r in ((part, r) for part in range(2) for r in range(2)):
                    at = CHUNK * part + tk.first_row() + 8 * r
                    sums[at, 0] = sums[at, 0] + w.sums[part].rows_view[r, 0]
        else:
            tk.fill(w.ones, 1.0)
            tk.mm_AB(w.y_q, w.ones, tiles[0])
            tk.mm_AB(w.y_k, w.ones, tiles[1])
            tk.mma_wait(0)
            if there and tk.warp_id() % 4 == 0 and tk.lane_id() < 4:
                add_row(sums, w.y_q, 0)
                add_row(sums, w.y_k, self.spec.features)


def following(ring: tk.Ring, n=1) -> tk.Ring:
    """The position that is n behind a ring's; below 0 before it."""
    found = tk.Ring(cute.make_rmem_tensor((1,), Uint32), ring.stages)
    found.count[0] = ring.count[0] + Uint32(n)
    return found
