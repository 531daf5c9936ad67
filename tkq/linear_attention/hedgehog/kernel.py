"""Hedgehog's attention (Zhang et al., 2024, in the form of LoLCATS, 2024), chunk by chunk, with the state in
accumulators."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import HedgehogConfig
from tkq.linear_attention.hedgehog.segments import Segments
from tkq.linear_attention.hedgehog.spec import HedgehogSpec
from tkq.linear_attention.hedgehog.weights import ONES, WeightsPart
from tkq.linear_attention.outputs import put
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

OUT_BARRIER = 2  # the named barrier of the state's first warpgroup; the other has the next, the weights' the one before


class Operands(NamedTuple):
    """q, k, v, o: (B, S, H, D). q_map, k_map: (H, D, F). linear, window: factors, (H,) fp32. inverse, most: (B, S, H)
    fp32, of each token 1 over its denominator, and the largest of its scores: what gradients begin with. Of segments,
    or None: states: (blocks, B, H, groups, F, 128) fp32, as the threads of a group hold them; sums: of features,
    (blocks, B, H, 2 F) fp32. Where features are kept, or None: q_features, k_features: (B, S, H, 2 F), rounded as they
    are multiplied; keys' last chunk, which no query has before its window, is not written."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    q_map: cute.Tensor
    k_map: cute.Tensor
    linear: cute.Tensor
    window: cute.Tensor
    inverse: cute.Tensor
    most: cute.Tensor
    states: Optional[cute.Tensor]
    sums: Optional[cute.Tensor]
    q_features: Optional[cute.Tensor]
    k_features: Optional[cute.Tensor]


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
    inverse: cute.Tensor
    most: cute.Tensor
    states: Optional[cute.Tensor]
    sums: Optional[cute.Tensor]
    q_features: Optional[tk.gl]
    k_features: Optional[tk.gl]
    scale: Float32
    tokens: Int32
    each: Int32  # chunks of a block
    finer: Int32  # blocks of "states" for each segment


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
    ones: tk.SharedTile
    inverse: cute.Tensor  # of denominators, two stages
    map_pipe: tk.Pipe
    tokens: tk.Pipe
    keys: tk.Pipe
    weights: tk.Pipe


@dataclass(frozen=True)
class Task:
    """One head of one sequence, or a segment of it. before: as `segments.Segments.place` has it."""

    batch: Int32
    head: Int32
    chunks: Int32
    first: Any = 0
    before: Any = 0


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

    Of part "states" (see `segments.Segments`) there are no queries and no P: tokens are values alone, which the weights
    do not read (4 groups), and keys are those of the chunk itself.
    """

    def __init__(self, spec: HedgehogSpec, config: HedgehogConfig):
        self.spec, self.config = spec, config
        self.dtype = element_type(spec.dtype)
        self.x_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.map_tile = tk.st(spec.head_dim, spec.features, self.dtype)
        self.f_tile = tk.st(CHUNK, spec.features, self.dtype)
        self.v_tile = self.p_tile = tk.st(CHUNK, CHUNK, self.dtype)
        self.ones_tile = tk.st(ONES, CHUNK, self.dtype)
        self.segments = Segments(spec)
        self.weights = WeightsPart(spec, self.dtype, self.segments)

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
        inverse, most = [fake.tensor("fp32", (B, S, H), align=4) for _ in range(2)]
        of_segments = self.segments.fake_arguments(B, H, self.config.groups)
        kept = [operand(B, S, H, 2 * spec.features) if spec.keeps else None for _ in range(2)]
        return tokens[0], (*tokens[1:], *maps, *factors, inverse, most, *of_segments, *kept), Float32(1.0), 1, 1, 1

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, blocks: Int32, each: Int32, finer: Int32,
                 stream: cuda.CUstream):
        """others: those of `Operands` behind q. blocks: how many are launched of each head of a sequence. each: chunks
        of a block. finer: blocks of "states" for each segment."""
        operands = Operands(q, *others)
        # (batch, token, head, col) to (token, col, head, batch); (head, row, col) to (row, col, head)
        q, k, v, o = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])) for x in operands[:4]]
        maps = [cute.make_tensor(x.iterator, cute.select(x.layout, [1, 2, 0])) for x in operands[4:6]]
        kept = [None, None]
        if const_expr(self.spec.keeps):
            kept = [tk.gl.store(cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0])), self.f_tile)
                    for x in operands[12:]]
        g = Globals(tk.gl.load(q, self.x_tile), tk.gl.load(k, self.x_tile), tk.gl.load(v, self.v_tile),
                    tk.gl.store(o, self.v_tile), *[tk.gl.load(x, self.map_tile) for x in maps], *operands[6:12], *kept,
                    scale, Int32(q.shape[0]), each, finer)
        self.kernel(g).launch(
            grid=[o.shape[2], o.shape[3], blocks], block=[tk.WARPGROUP * (self.config.groups + 2), 1, 1],
            stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, n, bytes_of_x, states = tk.SharedAllocator(), self.config.groups, self.x_tile.bytes, self.segments.states
        q, k, v, o = al.tile(self.x_tile, 2), al.tile(self.x_tile, 3), al.tile(self.v_tile, 2 * n), al.tile(
            self.v_tile, n)
        maps, p = al.tile(self.map_tile, 2), al.tile(self.p_tile, 4)
        of_q, of_k = [x.scratch(self.f_tile) if self.spec.in_place else al.tile(self.f_tile, 4) for x in (q, k)]
        s = Shared(q, k, v, o, maps, p, of_q, of_k, al.vector(2 * self.spec.features),
                   al.tile(self.ones_tile), al.vector(CHUNK, 2),
                   al.pipe(1, (2 - states) * self.map_tile.bytes + self.segments.outputs * n * self.v_tile.bytes, 4),
                   al.pipe(2, (1 - states) * bytes_of_x + n * self.v_tile.bytes, (1 - states) * 4 + 4 * n),
                   al.pipe(3, bytes_of_x, 4 + 4 * n),
                   al.pipe(2, 0, 4 * n, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.map_pipe, s.tokens, s.keys, s.weights)])
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, self.task(g)), few, warps=1),
                   tk.Role(lambda _: self.weights.run(g, s, self.task(g)), some),
                   tk.Role(lambda wg: self.keep_state(g, s, self.task(g), wg), many, n)))

    def task(self, g):
        """The block's. Each role has its own: what is known before them takes registers that they have not yet."""
        head, batch, n = cute.arch.block_idx()
        return Task(batch, head, *self.segments.place(g, n))

    @cute.jit
    def produce(self, g, s, t):
        if const_expr(self.segments.states):
            self.segments.produce(g, s, t, self.config.groups)
        else:
            self.load_all(g, s, t)

    @cute.jit
    def load_all(self, g, s, t):
        tk.prefetch(g.q_map, g.k_map, g.q, g.k, g.v, g.o)
        of_maps = s.map_pipe.acquire(s.map_pipe.ring())
        tk.load_async(s.maps[0], g.q_map, (t.head, 0, 0), of_maps)
        tk.load_async(s.maps[1], g.k_map, (t.head, 0, 0), of_maps)
        if const_expr(self.segments.outputs):
            self.segments.load_before(g, s, t, self.config.groups, of_maps)
        tokens, keys = s.tokens.ring(), s.keys.ring()
        tk.load_async(s.k[keys.stage], g.k, (t.batch, t.head, cutlass.max(t.first - 1, Int32(0)), 0),
                      s.keys.acquire(keys))
        keys.advance()
        for i in cutlass.range(t.first, t.first + t.chunks, unroll=1):
            tk.load_async(s.k[keys.stage], g.k, (t.batch, t.head, i, 0), s.keys.acquire(keys))
            sem = s.tokens.acquire(tokens)
            tk.load_async(s.q[tokens.stage], g.q, (t.batch, t.head, i, 0), sem)
            for wg in cutlass.range_constexpr(self.config.groups):
                tk.load_async(s.v[self.config.groups * tokens.stage + wg], g.v, (t.batch, t.head, i, wg), sem)
            tokens.advance()
            keys.advance()

    # ---- the state's warpgroups ----------------------------------------------------------------

    @cute.jit
    def keep_state(self, g, s, t, wg):
        F, dtype = self.spec.features, self.dtype
        c = State(tk.rt_fl(F), tk.rt_fl(F), tk.rt(F, dtype), tk.rt(F, dtype), tk.rt(CHUNK, dtype), tk.rt(CHUNK, dtype),
                  tk.rt_fl(CHUNK), tk.cv(CHUNK))
        if const_expr(self.segments.states):
            self.add_chunks(g, s, t, c, wg)
        else:
            self.take_chunks(g, s, t, c, wg)

    @cute.jit
    def add_chunks(self, g, s, t, c, wg):
        """What they add to a state, alone."""
        self.segments.begin_state(g, s, t, c, wg)
        tokens, keys, weights = s.tokens.ring(), s.keys.ring(), s.weights.ring()
        for _ in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(tokens)
            tk.load_T(c.v, s.v[self.config.groups * tokens.stage + wg])
            s.weights.wait(weights)
            of_k = self.weights.of_keys(s, keys, weights)
            tk.mma_AB(c.of_y, c.v, of_k[0])
            tk.mma_AB(c.of_minus_y, c.v, of_k[1])
            tk.mma_wait(0)
            s.tokens.release(tokens)
            s.keys.release(keys)
            s.weights.release(weights)
            for ring in (tokens, keys, weights):
                ring.advance()
        self.segments.end_state(g, t, c, wg)

    @cute.jit
    def take_chunks(self, g, s, t, c, wg):
        self.segments.begin_state(g, s, t, c, wg)
        linear = g.linear[t.head]
        tokens, keys, weights = s.tokens.ring(), s.keys.ring(), s.weights.ring()
        for i in cutlass.range(t.first, t.first + t.chunks, unroll=1):
            s.tokens.wait(tokens)
            tk.copy(c.y16, c.of_y)
            tk.copy(c.minus_y16, c.of_minus_y)
            s.weights.wait(weights)
            of_q, of_k = self.weights.of_queries(s, tokens, weights), self.weights.of_keys(s, keys, weights)
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
            put(g.o, s.o, c.o, (t.batch, t.head, i, 0), OUT_BARRIER, wg)
            tk.mma_wait(0)
            tk.copy(c.before, c.v)
            s.tokens.release(tokens)
            s.keys.release(keys)
            s.weights.release(weights)
            for ring in (tokens, keys, weights):
                ring.advance()
        tk.store_wait(read=False)
