"""Hedgehog's attention (Zhang et al., 2024, in the form of LoLCATS, 2024), chunk by chunk, with the state in
accumulators."""
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import HedgehogConfig
from tkq.linear_attention.hedgehog.features import add_row, make_features
from tkq.linear_attention.hedgehog.spec import HedgehogSpec
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

WEIGHTS_BARRIER, OUT_BARRIER = 1, 2  # named barriers: of the weights' warpgroup, of the state's (one each)
EPS = 1e-6  # of the denominator


class Operands(NamedTuple):
    """q, k, v, o: (B, S, H, D). q_map, k_map: (H, D, F). linear, window: factors, (H,) fp32."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    q_map: cute.Tensor
    k_map: cute.Tensor
    linear: cute.Tensor
    window: cute.Tensor


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: tk.gl
    q_map: tk.gl
    k_map: tk.gl
    linear: cute.Tensor
    window: cute.Tensor
    scale: Float32


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile  # of each stage the tiles of the state's warpgroups
    o: tk.SharedTile
    maps: tk.SharedTile  # q's, k's
    p: tk.SharedTile  # of each stage: weights of the chunk's own keys, of those of the chunk before
    of_q: tk.SharedTile  # features: of each stage those of y, those of -y
    of_k: tk.SharedTile
    sums: cute.Tensor  # features of all keys that have left the window, summed: of y, of -y
    inverse: cute.Tensor  # of denominators, two stages
    map_pipe: tk.Pipe
    tokens: tk.Pipe
    keys: tk.Pipe
    weights: tk.Pipe


@dataclass(frozen=True)
class Task:
    """One head of one sequence."""

    batch: Int32
    head: Int32
    chunks: Int32


@dataclass(frozen=True)
class Weights:
    """Registers of the weights' warpgroup: 64 tokens."""

    now: tk.RegTile  # scores of the chunk's own keys
    past: tk.RegTile  # of those of the chunk before
    y_q: tk.RegTile
    y_k: tk.RegTile
    e: tk.RegTile
    ones: tk.RegTile
    most: tk.RowVec
    total: tk.RowVec
    far: tk.RowVec  # what the state adds to denominators
    row: tk.RowVec


@dataclass(frozen=True)
class State:
    """Registers of 64 rows of V."""

    of_y: tk.RegTile  # the state, transposed: V by the features of y
    of_minus_y: tk.RegTile
    y16: tk.RegTile  # the same, rounded: operands
    minus_y16: tk.RegTile
    v: tk.RegTile  # a chunk's values, transposed
    before: tk.RegTile  # those of the chunk before
    o: tk.RegTile  # outputs, transposed: V by tokens
    inverse: tk.ColVec


class HedgehogAttention:
    """With y = x W of each head and f(x) = max(1e-6, (softmax(y), softmax(-y))) of queries and keys by their maps,

        a[i, j] = window * exp(q[i] k[j] / sqrt(D) - most[i])     for j <= i of query i's chunk of 64 and of that before
        a[i, j] = linear * f(q[i]) f(k[j])                        for j of chunks before these
        o[i] = sum over j of a[i, j] v[j] / (sum over j of a[i, j] + 1e-6)

    and most[i] the largest of the scores in the window. A block has one head of one sequence and all columns of V, 64
    for each of its warpgroups of the state. These keep S' (V by 2 F, fp32) in accumulators from the first chunk to the
    last: of chunk i it has the keys of chunks up to i - 2, and takes up those of chunk i - 1 behind it.

      producer (a warp)        maps; K Q V of a chunk | of the next | ..
      weights (a warpgroup)    Q K', softmax in the window: P; Q Wq, K Wk of the chunk before: features | ..
      state (1 or 2)           O' = S' f(Q)', O' += V' P', S' += V' f(K) of the chunk before | O to global memory | ..

    P holds exponentials, not above 1, times the window's factor; outputs are divided at the end, by what the weights'
    warpgroup adds up in fp32. Its sum of features of far keys is a product with ones, of the same rounded features that
    the state takes up. Where they fit, features are written over the queries and keys that they are made of.

      pipe      stages   full (arrivals)            empty (arrivals)
      maps      1        producer's bytes (1)       none
      tokens    2        producer's bytes (1)       warps of weights and state (4 + 4 groups): queries and values
      keys      3        producer's bytes (1)       the same, a chunk later; the first stage is of a chunk before the
                                                    first, which has weights of 0, and is chunk 0 once more
      weights   2        warps of the weights (4)   warps of the state (4 groups)
    """

    def __init__(self, spec: HedgehogSpec, config: HedgehogConfig):
        self.spec, self.config = spec, config
        self.dtype = element_type(spec.dtype)
        self.x_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.map_tile = tk.st(spec.head_dim, spec.features, self.dtype)
        self.f_tile = tk.st(CHUNK, spec.features, self.dtype)
        self.v_tile = self.p_tile = tk.st(CHUNK, CHUNK, self.dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and H, and strides that are multiples of 16 bytes."""
        spec, (B, S, H) = self.spec, (fake.sym() for _ in range(3))

        def operand(*shape):
            strides = (*(fake.sym64(divisibility=8) for _ in shape[1:]), 1)
            return fake.tensor(spec.dtype, shape, strides)

        tokens = [operand(B, S, H, spec.head_dim) for _ in range(4)]
        maps = [operand(H, spec.head_dim, spec.features) for _ in range(2)]
        factors = [fake.tensor("fp32", (H,), align=4) for _ in range(2)]
        return tokens[0], (*tokens[1:], *maps, *factors), Float32(1.0)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind q."""
        operands = Operands(q, *others)
        # (batch, token, head, col) to (token, col, head, batch); (head, row, col) to (row, col, head)
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in operands[:4]]
        maps = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 2, 0])) for x in operands[4:6]]
        g = Globals(tk.gl.load(q, self.x_tile), tk.gl.load(k, self.x_tile), tk.gl.load(v, self.v_tile),
                    tk.gl.store(o, self.v_tile), *[tk.gl.load(x, self.map_tile) for x in maps], *operands[6:], scale)
        self.kernel(g, Int32(q.shape[0])).launch(
            grid=[o.shape[2], o.shape[3], 1], block=[tk.WARPGROUP * (self.config.groups + 2), 1, 1], stream=stream,
            min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals, tokens: Int32):
        al, n, bytes_of_x = tk.SharedAllocator(), self.config.groups, self.x_tile.bytes
        q, k, v, o = al.tile(self.x_tile, 2), al.tile(self.x_tile, 3), al.tile(self.v_tile, 2 * n), al.tile(
            self.v_tile, n)
        maps, p = al.tile(self.map_tile, 2), al.tile(self.p_tile, 4)
        of_q, of_k = [x.scratch(self.f_tile) if self.spec.in_place else al.tile(self.f_tile, 4) for x in (q, k)]
        s = Shared(q, k, v, o, maps, p, of_q, of_k, al.vector(2 * self.spec.features), al.vector(CHUNK, 2),
                   al.pipe(1, 2 * self.map_tile.bytes, 4),
                   al.pipe(2, bytes_of_x + n * self.v_tile.bytes, 4 + 4 * n), al.pipe(3, bytes_of_x, 4 + 4 * n),
                   al.pipe(2, 0, 4 * n, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.map_pipe, s.tokens, s.keys, s.weights)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(tokens, CHUNK))
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda _: self.make_weights(g, s, t), some),
                   tk.Role(lambda wg: self.keep_state(g, s, t, wg), many, n)))

    def of_queries(self, s, tokens, weights):
        """Features of a chunk's queries: (of y, of -y)."""
        first = 2 * (tokens.stage if self.spec.in_place else weights.stage)
        return s.of_q[first], s.of_q[first + 1]

    def of_keys(self, s, keys, weights):
        """Those of the chunk before."""
        first = 2 * (keys.stage if self.spec.in_place else weights.stage)
        return s.of_k[first], s.of_k[first + 1]

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.q_map, g.k_map, g.q, g.k, g.v, g.o)
        of_maps = s.map_pipe.acquire(s.map_pipe.ring())
        tk.load_async(s.maps[0], g.q_map, (t.head, 0, 0), of_maps)
        tk.load_async(s.maps[1], g.k_map, (t.head, 0, 0), of_maps)
        tokens, keys = s.tokens.ring(), s.keys.ring()
        tk.load_async(s.k[keys.stage], g.k, (t.batch, t.head, 0, 0), s.keys.acquire(keys))
        keys.advance()
        for i in cutlass.range(t.chunks, unroll=1):
            tk.load_async(s.k[keys.stage], g.k, (t.batch, t.head, i, 0), s.keys.acquire(keys))
            sem = s.tokens.acquire(tokens)
            tk.load_async(s.q[tokens.stage], g.q, (t.batch, t.head, i, 0), sem)
            for wg in cutlass.range_constexpr(self.config.groups):
                tk.load_async(s.v[self.config.groups * tokens.stage + wg], g.v, (t.batch, t.head, i, wg), sem)
            tokens.advance()
            keys.advance()

    # ---- the weights' warpgroup ----------------------------------------------------------------

    @cute.jit
    def make_weights(self, g, s, t):
        F = self.spec.features
        now, past = tk.rt_fl(CHUNK), tk.rt_fl(CHUNK)
        # a product's registers are taken also before it: as few as can be
        of_maps = (now, past) if F == CHUNK else (tk.rt_fl(F), tk.rt_fl(F))
        w = Weights(now, past, *of_maps, tk.rt_fl(F), tk.rt(CHUNK, self.dtype), *[tk.rv() for _ in range(4)])
        sums = s.sums
        if tk.thread_in_warpgroup() < 2 * F:
            sums[tk.thread_in_warpgroup(), 0] = Float32(0.0)
        linear, window = g.linear[t.head], g.window[t.head]
        tokens, keys, before, out = s.tokens.ring(), s.keys.ring(), s.keys.ring(), s.weights.ring()
        s.map_pipe.wait(s.map_pipe.ring())
        s.keys.wait(keys)
        keys.advance()
        for i in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(tokens)
            s.keys.wait(keys)
            tk.mm_ABt(w.now, s.q[tokens.stage], s.k[keys.stage])
            tk.mm_ABt(w.past, s.q[tokens.stage], s.k[before.stage])
            tk.mma_wait(0)
            self.softmax(g, w, i)
            s.weights.acquire_empty(out)
            self.put_weights(w, w.now, s.p[2 * out.stage], window)
            self.put_weights(w, w.past, s.p[2 * out.stage + 1], window)
            tk.mm_AB(w.y_q, s.q[tokens.stage], s.maps[0])
            tk.mm_AB(w.y_k, s.k[before.stage], s.maps[1])
            tk.mma_wait(0)
            # queries and keys have been read, and the sums of the chunk before are there
            tk.sync(WEIGHTS_BARRIER, tk.WARPGROUP)
            tk.zero(w.far)
            make_features(w, w.y_q, self.of_queries(s, tokens, out), sums)
            make_features(w, w.y_k, self.of_keys(s, before, out))
            self.put_denominators(s, w, out.stage, (linear, window))
            tk.publish()
            s.weights.commit(out)
            tk.sync(WEIGHTS_BARRIER, tk.WARPGROUP)
            self.add_features(s, w, self.of_keys(s, before, out), i)
            s.tokens.release(tokens)
            s.keys.release(before)
            for ring in (tokens, keys, before, out):
                ring.advance()
        # the last chunk's keys leave the window for no query

    @cute.jit
    def softmax(self, g, w, i):
        """now, past = the window's exponentials; total = a thread's part of their sums."""
        tk.right_fill(w.now, 1, -Float32.inf, diagonal=True)
        if i == 0:
            tk.neg_infty(w.past)
        tk.row_max(w.most, w.now)
        tk.row_max(w.most, w.past, w.most)
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

    def put_denominators(self, s, w, stage, factors):
        linear, window = factors
        tk.apply(w.row, lambda near, far: window * near + linear * far, w.total, w.far)
        tk.quad_sum(w.row)
        tk.apply(w.row, lambda x: cute.arch.rcp_approx(x + EPS), w.row)
        tk.store_rows(s.inverse[None, stage], w.row, 0, CHUNK)

    @cute.jit
    def add_features(self, s, w, tiles, i):
        """sums += a chunk's features of keys, by a product with ones, each of whose rows is that sum."""
        tk.fill(w.ones, 1.0)
        tk.mm_AB(w.y_q, w.ones, tiles[0])
        tk.mm_AB(w.y_k, w.ones, tiles[1])
        tk.mma_wait(0)
        if i > 0 and tk.warp_id() % 4 == 0 and tk.lane_id() < 4:
            add_row(s.sums, w.y_q, 0)
            add_row(s.sums, w.y_k, self.spec.features)

    # ---- the state's warpgroups ----------------------------------------------------------------

    @cute.jit
    def keep_state(self, g, s, t, wg):
        F, dtype = self.spec.features, self.dtype
        c = State(tk.rt_fl(F), tk.rt_fl(F), tk.rt(F, dtype), tk.rt(F, dtype), tk.rt(CHUNK, dtype), tk.rt(CHUNK, dtype),
                  tk.rt_fl(CHUNK), tk.cv(CHUNK))
        for x in (c.of_y, c.of_minus_y, c.before):
            tk.zero(x)
        linear = g.linear[t.head]
        tokens, keys, weights = s.tokens.ring(), s.keys.ring(), s.weights.ring()
        for i in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(tokens)
            tk.copy(c.y16, c.of_y)
            tk.copy(c.minus_y16, c.of_minus_y)
            s.weights.wait(weights)
            of_q, of_k = self.of_queries(s, tokens, weights), self.of_keys(s, keys, weights)
            tk.mm_ABt(c.o, c.y16, of_q[0])
            tk.mma_ABt(c.o, c.minus_y16, of_q[1])
            tk.mma_wait(0)
            tk.load_T(c.v, s.v[self.config.groups * tokens.stage + wg])  # the rounded state has left its registers
            tk.mul(c.o, c.o, linear)
            tk.mma_ABt(c.o, c.v, s.p[2 * weights.stage])
            tk.mma_ABt(c.o, c.before, s.p[2 * weights.stage + 1])
            tk.mma_AB(c.of_y, c.before, of_k[0])
            tk.mma_AB(c.of_minus_y, c.before, of_k[1])
            tk.load_shared_cols(c.inverse, s.inverse[None, weights.stage])
            tk.mma_wait(2)
            tk.mul_col(c.o, c.o, c.inverse)
            self.put(g.o, s, t, c.o, i, wg)
            tk.mma_wait(0)
            tk.copy(c.before, c.v)
            s.tokens.release(tokens)
            s.keys.release(keys)
            s.weights.release(weights)
            for ring in (tokens, keys, weights):
                ring.advance()
        tk.store_wait(read=False)

    @cute.jit
    def put(self, to, s, t, x, chunk, wg):
        """A chunk's outputs through shared memory: those before have left it."""
        tile, leader = s.o[wg], tk.warp_id() % 4 == 0
        if leader:
            tk.store_wait()
        tk.sync(OUT_BARRIER + wg, tk.WARPGROUP)
        tk.store_T(tile, x)
        tk.publish()
        tk.sync(OUT_BARRIER + wg, tk.WARPGROUP)
        if leader:
            tk.store_async(to, tile, (t.batch, t.head, chunk, wg))
