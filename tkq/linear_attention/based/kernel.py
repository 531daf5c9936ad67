"""Based (Arora et al., 2024) with the state in accumulators."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.based import features
from tkq.linear_attention.based.config import BasedConfig
from tkq.linear_attention.based.held import add_held, put_held
from tkq.linear_attention.based.layout import COLUMNS, FIRST, HELD_MOMENTS, HELD_STATE
from tkq.linear_attention.based.spec import FEATURE_DIM, BasedSpec
from tkq.linear_attention.based.sums import Sums
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.outputs import put
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

SCORES_BARRIER, OUT_BARRIER = 1, 2  # named barriers: of the features' warpgroup, of the state's


class Operands(NamedTuple):
    """q, k: (B, S, H, 16). v: (B, S, HV, V). o: (B, S, HO, V), HO a multiple of H and HV. sums: (B, S, HO) fp32, of
    each token the sum of its weights, or None. states: of segments, or None: (segments, B, HO, parts of V, 80, 128)
    fp32, what a thread holds of a state side by side. moments: (segments, B, HO, 16, 128) fp32, likewise, with sums."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: Optional[cute.Tensor]
    sums: Optional[cute.Tensor]
    states: Optional[cute.Tensor]
    moments: Optional[cute.Tensor]


@dataclass(frozen=True)
class Globals:
    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: Optional[tk.gl]
    sums: Optional[cute.Tensor]
    states: Optional[cute.Tensor]
    moments: Optional[cute.Tensor]
    scale: Float32
    times: Float32
    tokens: Int32
    heads_per_k: Int32
    heads_per_v: Int32
    batches: Int32
    per_segment: Int32  # chunks


@dataclass(frozen=True)
class Shared:
    q: tk.SharedTile
    k: tk.SharedTile
    v: tk.SharedTile
    of_q: tuple  # features, in two tiles
    of_k: tuple
    p: tk.SharedTile
    o: tk.SharedTile
    sums: Any
    tokens: tk.Pipe
    ready: tk.Pipe


@dataclass(frozen=True)
class Task:
    """A head of a sequence, 64 columns of V, and chunks first .. first + count, in the order in which they are
    visited, of all chunks."""

    batch: Int32
    head: Int32
    head_k: Int32
    head_v: Int32
    part: Int32
    segment: Int32
    first: Int32
    count: Int32
    chunks: Int32


@dataclass(frozen=True)
class State:
    """Registers of 64 rows of V."""

    s: tuple  # the state, transposed: V by features, in two tiles
    s16: tuple  # the same, with the features' weights, rounded: operands
    v: tk.RegTile  # a chunk's values, transposed
    o: tk.RegTile  # outputs, transposed: V by tokens
    factor: tk.ColVec


class Based:
    """o[t] = sum of w[t, j] v[j] / sum of w[t, j] over j <= t, w[t, j] = 1 + s + s^2 / 2, s = scale * q[t] k[j];
    without norm the dividend. With f the features of `features`, whose products are w, and S the sum of f(k[j]) v[j]'
    over the chunks of 64 tokens before,

        O = f(Q) S + P V,   P[t, j] = w[t, j] for j <= t (reversed: for j >= t, and S of the chunks behind)

    A block has one head of one sequence, or a segment of it, and 64 columns of V. S' (V by 160 features, fp32) stays in
    the accumulators of one warpgroup from the first chunk to the last: with the features' weights, divided by a power
    of 2 near the number of tokens in it, and rounded to 16 bits, it is the A operand of S' f(Q)'; values transposed are
    that of V' P' and of S' += V' f(K). The other makes what these are multiplied by.

      producer (a warp)         Q K V of a chunk | of the next | ..
      features (a warpgroup)    f(Q), f(K), Q K' -> P, sums of weights | those of the next chunk | ..
      state (a warpgroup)       O' = S' f(Q)', O' += V' P', S' += V' f(K) | O to global memory | ..

    Segments: with part "states" a block adds up S alone, from zero, and writes it; with part "outputs" it begins with
    the sum of those of the segments before. No decay lies between, so the sum is all that a segment needs of them.

      pipe      stages           full (arrivals)              empty (arrivals)
      tokens    config.stages    producer's bytes (1)         warps of both warpgroups (8)
      ready     config.ahead     warps of the features (4)    warps of the state (4)
    """

    def __init__(self, spec: BasedSpec, config: BasedConfig):
        self.spec, self.config = spec, config
        self.dtype = element_type(spec.dtype)
        self.outputs = spec.part != "states"
        self.x_tile = tk.st(CHUNK, FEATURE_DIM, self.dtype)
        self.v_tile = self.p_tile = tk.st(CHUNK, CHUNK, self.dtype)
        self.f_tiles = tk.st(CHUNK, FIRST, self.dtype), tk.st(CHUNK, COLUMNS - FIRST, self.dtype)
        self.sums = Sums(spec, self.dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and heads, and strides of q, k, v and o that are multiples of 16 bytes."""
        spec, (B, S, H, HV, HO, segments) = self.spec, (fake.sym() for _ in range(6))

        def operand(heads, cols):
            return fake.tensor(spec.dtype, (B, S, heads, cols), (*(fake.sym64(divisibility=8) for _ in range(3)), 1))

        sums = fake.tensor("fp32", (B, S, HO), align=4) if spec.norm and self.outputs else None
        states = moments = None
        if spec.part:
            states = fake.tensor("fp32", (segments, B, HO, -(-spec.value_dim // CHUNK), HELD_STATE, tk.WARPGROUP))
            if spec.norm:
                moments = fake.tensor("fp32", (segments, B, HO, HELD_MOMENTS, tk.WARPGROUP))
        o = operand(HO, spec.value_dim) if self.outputs else None
        others = operand(H, FEATURE_DIM), operand(HV, spec.value_dim), o, sums, states, moments
        return operand(H, FEATURE_DIM), others, Float32(1.0), Float32(1.0), 1, 1, 1

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, times: Float32, heads: Int32, segments: Int32,
                 per_segment: Int32, stream: cuda.CUstream):
        """others: those of `Operands` behind q. times: without norm o is multiplied by it. heads: of o. segments: how
        many are launched of each sequence. per_segment: chunks."""
        operands = Operands(q, *others)
        rows = [x if x is None else cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))
                for x in operands[:4]]
        q, k, v, o = rows  # (token, col, head, batch)
        g = Globals(tk.gl.load(q, self.x_tile), tk.gl.load(k, self.x_tile), tk.gl.load(v, self.v_tile),
                    o if o is None else tk.gl.store(o, self.v_tile), *operands[4:], scale, times,
                    Int32(q.shape[0]), heads // k.shape[2], heads // v.shape[2], Int32(q.shape[3]), per_segment)
        parts = -(-self.spec.value_dim // CHUNK)
        self.kernel(g).launch(grid=[parts, heads, q.shape[3] * segments], block=[3 * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c, al = self.config, tk.SharedAllocator()
        s = Shared(al.tile(self.x_tile, c.stages), al.tile(self.x_tile, c.stages), al.tile(self.v_tile, c.stages),
                   *[tuple(al.tile(x, c.ahead) for x in self.f_tiles) for _ in range(2)], al.tile(self.p_tile, c.ahead),
                   al.tile(self.v_tile), self.sums.shared(al, c.ahead),
                   al.pipe(c.stages, (1 + self.outputs) * self.x_tile.bytes + self.v_tile.bytes, 8),
                   al.pipe(c.ahead, 0, 4, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.tokens, s.ready)])
        part, head, block = cute.arch.block_idx()
        chunks, segment = cute.ceil_div(g.tokens, CHUNK), block // g.batches
        first = segment * g.per_segment
        t = Task(block % g.batches, head, head // g.heads_per_k, head // g.heads_per_v, part, segment, first,
                 cutlass.min(chunks - first, g.per_segment), chunks)
        few, some, many = c.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda _: self.make_features(g, s, t), some),
                   tk.Role(lambda _: self.keep_state(g, s, t), many)))

    def order(self, t, i):
        """The chunk that is visited as the task's i-th."""
        return t.chunks - 1 - t.first - i if self.spec.reverse else t.first + i

    @cute.jit
    def produce(self, g, s, t):
        ring = s.tokens.ring()
        tk.prefetch(g.q, g.k, g.v)
        for i in cutlass.range(t.count, unroll=1):
            chunk = self.order(t, i)
            sem = s.tokens.acquire(ring)
            tk.load_async(s.k[ring.stage], g.k, (t.batch, t.head_k, chunk, 0), sem)
            if const_expr(self.outputs):
                tk.load_async(s.q[ring.stage], g.q, (t.batch, t.head_k, chunk, 0), sem)
            tk.load_async(s.v[ring.stage], g.v, (t.batch, t.head_v, chunk, t.part), sem)
            ring.advance()

    @cute.jit
    def make_features(self, g, s, t):
        """Of each chunk, with P and the sums of its weights."""
        ring, out = s.tokens.ring(), s.ready.ring()
        made = tk.rt(FIRST, self.dtype), tk.rt(COLUMNS - FIRST, self.dtype)
        x, p = tk.rt_fl(CHUNK), tk.rt(CHUNK, self.dtype)
        sums = self.sums.begin(g, t)
        self.sums.carry(sums, s.sums, t.first, 0)
        for i in cutlass.range(t.count, unroll=1):
            s.tokens.wait(ring)
            s.ready.acquire_empty(out)
            if const_expr(self.outputs):
                self.put_features(s.of_q, out.stage, made, s.q[ring.stage])
                self.sums.see(sums, made[0])
            self.put_features(s.of_k, out.stage, made, s.k[ring.stage])
            tk.publish()
            tk.sync(SCORES_BARRIER, tk.WARPGROUP)
            if const_expr(self.outputs):
                tk.mm_ABt(x, s.q[ring.stage], s.k[ring.stage])
            self.sums.products(sums, s.sums, s.of_q[0][out.stage], s.of_k[0][out.stage], i)
            tk.mma_wait(0)
            s.tokens.release(ring)
            if const_expr(self.outputs):
                self.weigh(x, g.scale)
                tk.copy(p, x)
                tk.store(s.p[out.stage], p)
                self.sums.put(sums, s.sums, x, g, t, self.order(t, i), t.first + i, out.stage)
            self.sums.carry(sums, s.sums, t.first + i + 1, i + 1)
            tk.publish()
            s.ready.commit(out)
            ring.advance()
            out.advance()
        self.sums.end(sums, g, t)

    def put_features(self, to, stage, made, x):
        features.make(*made, features.Row(x))
        for i in range(2):
            tk.store(to[i][stage], made[i])

    @cute.jit
    def weigh(self, x: tk.RegTile, scale):
        """Products of queries and keys become weights, 0 for keys that a query does not see."""
        tk.apply(x, lambda y: self.weight(y * scale), x)
        if const_expr(self.spec.reverse):
            tk.left_fill(x, 0, 0.0, diagonal=True)
        else:
            tk.right_fill(x, 1, 0.0, diagonal=True)

    def weight(self, s):
        return cute.math.fma(s, cute.math.fma(s, Float32(0.5), Float32(1.0)), Float32(1.0))

    @cute.jit
    def keep_state(self, g, s, t):
        widths = FIRST, COLUMNS - FIRST
        c = State(tuple(tk.rt_fl(n) for n in widths), tuple(tk.rt(n, self.dtype) for n in widths),
                  tk.rt(CHUNK, self.dtype), tk.rt_fl(CHUNK), tk.cv(CHUNK))
        ring, ready = s.tokens.ring(), s.ready.ring()
        self.first_state(g, t, c)
        for i in cutlass.range(t.count, unroll=1):
            times, back = features.tokens_near(t.first + i)
            if const_expr(self.outputs):
                features.narrow(c.s16, c.s, g.scale, times)
            s.tokens.wait(ring)
            tk.load_T(c.v, s.v[ring.stage])
            s.ready.wait(ready)
            if const_expr(self.outputs):
                tk.mm_ABt(c.o, c.s16[0], s.of_q[0][ready.stage])
                tk.mma_ABt(c.o, c.s16[1], s.of_q[1][ready.stage])
                tk.mma_wait(0)
                tk.mul(c.o, c.o, back)
                tk.mma_ABt(c.o, c.v, s.p[ready.stage])
            for n in cutlass.range_constexpr(2):
                tk.mma_AB(c.s[n], c.v, s.of_k[n][ready.stage])
            if const_expr(self.outputs):
                tk.mma_wait(2)
                if const_expr(self.spec.norm):
                    self.sums.divide(c.o, c.factor, s.sums, ready.stage)
                else:
                    tk.mul(c.o, c.o, g.times)
                put(g.o, s.o, c.o, (t.batch, t.head, self.order(t, i), t.part), OUT_BARRIER, 0)
            tk.mma_wait(0)
            s.tokens.release(ring)
            s.ready.release(ready)
            ring.advance()
            ready.advance()
        if const_expr(self.spec.part == "states"):
            self.last_state(g, t, c)
        if const_expr(self.outputs):
            tk.store_wait(read=False)

    @cute.jit
    def first_state(self, g, t, c):
        """Zero, or the sum of the segments before, in their order."""
        for n in cutlass.range_constexpr(2):
            tk.zero(c.s[n])
        if const_expr(self.spec.part == "outputs"):
            for segment in cutlass.range(t.segment, unroll=1):
                add_held(c.s, g.states[segment, t.batch, t.head, t.part, None, None])

    @cute.jit
    def last_state(self, g, t, c):
        put_held(g.states[t.segment, t.batch, t.head, t.part, None, None], c.s)
