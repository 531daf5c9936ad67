"""The gradients of Based's q and k."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.based import chain, features
from tkq.linear_attention.based.config import GradientConfig
from tkq.linear_attention.based.layout import COLUMNS, FIRST, MOMENTS
from tkq.linear_attention.based.moments import Moments
from tkq.linear_attention.based.spec import FEATURE_DIM, GradientSpec
from tkq.linear_attention.config import CHUNK
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

FEATURES_BARRIER = 1  # named barrier of the features' warpgroup


class GradientOperands(NamedTuple):
    """x, y: (B, S, H, 16): q and k; reversed, k and q. a, b: (B, S, HA, V) and (B, S, HB, V): do and v; reversed, v and
    do. delta: (B, S, HO) fp32, or None. dx: (parts of V, B, S, HO, 16) contiguous, of fp32; of q's dtype
    where V has one part."""

    x: cute.Tensor
    y: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor
    delta: Optional[cute.Tensor]
    dx: cute.Tensor


@dataclass(frozen=True)
class Globals:
    x: tk.gl
    y: tk.gl
    a: tk.gl
    b: tk.gl
    delta: Optional[cute.Tensor]
    dx: cute.Tensor
    scale: Float32
    times: Float32
    tokens: Int32
    heads_per_x: Int32
    heads_per_a: Int32
    heads_per_b: Int32


@dataclass(frozen=True)
class Shared:
    x: tk.SharedTile
    y: tk.SharedTile
    a: tk.SharedTile
    b: tk.SharedTile
    of_y: tuple  # features, in two tiles
    state: tuple  # V by features, likewise
    moments: Any
    tokens: tk.Pipe
    ready: tk.Pipe
    states: tk.Pipe


@dataclass(frozen=True)
class Task:
    """A head of a sequence, and 64 columns of V."""

    batch: Int32
    head: Int32
    part: Int32
    chunks: Int32


@dataclass(frozen=True)
class Gradient:
    """Registers of 64 tokens."""

    s: tk.RegTile  # x y'
    d: tk.RegTile  # a b'
    w: tk.RegTile  # what y's rows are multiplied by, an operand
    near: tk.RegTile  # the gradients from the chunk itself
    far: tuple  # gradients of the features, from the chunks before, in two tiles
    of_moments: tk.RegTile
    rows: tk.RowVec
    cols: tk.ColVec


class BasedGradient:
    """dx[i] = scale * times * sum of (a[i] b[j] - delta) (1 + s) y[j] over j <= i, s = scale * x[i] y[j]: with x = q,
    y = k, a = do divided by the sum of weights, b = v and delta[i] = a[i] o[i] the gradient of q. Reversed, over
    j >= i, with k, q, v, do so divided and delta[j], that of k. Without a norm do is not divided, and there is no
    delta.

    Within a chunk of 64 tokens it is (A B' - delta) (1 + s) Y, masked. What the chunks before add is, of the features
    f,

        dF = A S,  S the sum of b[j] f(y[j])',   dx = dF times the derivatives of f at x,

    whose second-order features are products of two columns of x each, less the moments' part (see `Moments`).

    A block has one head of one sequence and 64 columns of V, of which b and the state in accumulators, S' (V by 160),
    are; parts of V are added up by the caller.

      producer (a warp)          X Y A B of a chunk | of the next | ..
      features (a warpgroup)     f(Y), moments | those of the next chunk | ..
      state (a warpgroup)        S, rounded, to shared memory; S += B' f(Y) | ..
      gradients (a warpgroup)    X Y', A B' -> W, W Y, A S -> dX to global memory | ..

      pipe      stages           full (arrivals)              empty (arrivals)
      tokens    config.stages    producer's bytes (1)         warps of the three warpgroups (12)
      ready     config.ahead     warps of the features (4)    warps of the other two (8)
      states    config.states    warps of the state (4)       warps of the gradients (4)
    """

    def __init__(self, spec: GradientSpec, config: GradientConfig):
        self.spec, self.config = spec, config
        self.dtype = element_type(spec.dtype)
        self.x_tile, self.v_tile = tk.st(CHUNK, FEATURE_DIM, self.dtype), tk.st(CHUNK, CHUNK, self.dtype)
        self.f_tiles = tk.st(CHUNK, FIRST, self.dtype), tk.st(CHUNK, COLUMNS - FIRST, self.dtype)
        self.moments = Moments(spec, self.dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and heads, and strides of x, y, a and b that are multiples of 16 bytes."""
        spec, (B, S, H, HA, HB, HO) = self.spec, (fake.sym() for _ in range(6))

        def operand(heads, cols):
            return fake.tensor(spec.dtype, (B, S, heads, cols), (*(fake.sym64(divisibility=8) for _ in range(3)), 1))

        delta = fake.tensor("fp32", (B, S, HO), align=4) if spec.norm else None
        parts = -(-spec.value_dim // CHUNK)
        dx = fake.tensor(spec.dtype if parts == 1 else "fp32", (parts, B, S, HO, FEATURE_DIM))
        others = operand(H, FEATURE_DIM), operand(HA, spec.value_dim), operand(HB, spec.value_dim), delta, dx
        return operand(H, FEATURE_DIM), others, Float32(1.0), Float32(1.0)

    @cute.jit
    def __call__(self, x: cute.Tensor, others: Any, scale: Float32, times: Float32, stream: cuda.CUstream):
        """others: those of `GradientOperands` behind x."""
        operands = GradientOperands(x, *others)
        x, y, a, b = [cute.make_tensor(z.iterator, cute.select(z.layout, [1, 3, 2, 0])) for z in operands[:4]]
        parts, heads = operands.dx.shape[0], operands.dx.shape[3]
        g = Globals(tk.gl.load(x, self.x_tile), tk.gl.load(y, self.x_tile), tk.gl.load(a, self.v_tile),
                    tk.gl.load(b, self.v_tile), *operands[4:], scale, times, Int32(x.shape[0]), heads // x.shape[2],
                    heads // a.shape[2], heads // b.shape[2])
        self.kernel(g).launch(grid=[parts, heads, x.shape[3]], block=[4 * tk.WARPGROUP, 1, 1], stream=stream,
                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        c, al = self.config, tk.SharedAllocator()
        s = Shared(*[al.tile(self.x_tile, c.stages) for _ in range(2)], *[al.tile(self.v_tile, c.stages)
                                                                          for _ in range(2)],
                   tuple(al.tile(x, c.ahead) for x in self.f_tiles), tuple(al.tile(x, c.states) for x in self.f_tiles),
                   self.moments.shared(al, c.ahead), al.pipe(c.stages, 2 * (self.x_tile.bytes + self.v_tile.bytes), 12),
                   al.pipe(c.ahead, 0, 8, producers=4), al.pipe(c.states, 0, 4, producers=4))
        tk.init_block(lambda: [x.init() for x in (s.tokens, s.ready, s.states)])
        part, head, batch = cute.arch.block_idx()
        t = Task(batch, head, part, cute.ceil_div(g.tokens, CHUNK))
        registers = c.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), registers[0], warps=1),
                   tk.Role(lambda _: self.make_features(g, s, t), registers[1]),
                   tk.Role(lambda _: self.keep_state(g, s, t), registers[2]),
                   tk.Role(lambda _: self.make_gradients(g, s, t), registers[3])))

    def order(self, t, i):
        """The i-th chunk that is visited."""
        return t.chunks - 1 - i if self.spec.reverse else i

    @cute.jit
    def produce(self, g, s, t):
        ring = s.tokens.ring()
        tk.prefetch(g.x, g.y, g.a, g.b)
        for i in cutlass.range(t.chunks, unroll=1):
            chunk = self.order(t, i)
            sem = s.tokens.acquire(ring)
            tk.load_async(s.y[ring.stage], g.y, (t.batch, t.head // g.heads_per_x, chunk, 0), sem)
            tk.load_async(s.x[ring.stage], g.x, (t.batch, t.head // g.heads_per_x, chunk, 0), sem)
            tk.load_async(s.b[ring.stage], g.b, (t.batch, t.head // g.heads_per_b, chunk, t.part), sem)
            tk.load_async(s.a[ring.stage], g.a, (t.batch, t.head // g.heads_per_a, chunk, t.part), sem)
            ring.advance()

    @cute.jit
    def make_features(self, g, s, t):
        ring, out = s.tokens.ring(), s.ready.ring()
        made, m = (tk.rt(FIRST, self.dtype), tk.rt(COLUMNS - FIRST, self.dtype)), self.moments.begin()
        for i in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(ring)
            s.ready.acquire_empty(out)
            features.make(*made, features.Row(s.y[ring.stage]))
            for n in cutlass.range_constexpr(2):
                tk.store(s.of_y[n][out.stage], made[n])
            self.moments.put_sum(m, s.moments, g.scale, i, out.stage)
            self.moments.put_x(m, s.moments, features.Row(s.x[ring.stage]), out.stage)
            self.moments.put_weighted(m, s.moments, g, t, (self.order(t, i), i), made[0])
            tk.publish()
            s.tokens.release(ring)
            s.ready.commit(out)
            tk.sync(FEATURES_BARRIER, tk.WARPGROUP)
            self.moments.products(m, s.moments, s.of_y[0][out.stage], i)
            tk.mma_wait(0)
            ring.advance()
            out.advance()

    @cute.jit
    def keep_state(self, g, s, t):
        widths = FIRST, COLUMNS - FIRST
        state, narrow = tuple(tk.rt_fl(n) for n in widths), tuple(tk.rt(n, self.dtype) for n in widths)
        b = tk.rt(CHUNK, self.dtype)
        ring, ready, out = s.tokens.ring(), s.ready.ring(), s.states.ring()
        for n in cutlass.range_constexpr(2):
            tk.zero(state[n])
        for i in cutlass.range(t.chunks, unroll=1):
            times, _ = features.tokens_near(i)
            features.narrow(narrow, state, g.scale, times)
            s.states.acquire_empty(out)
            for n in cutlass.range_constexpr(2):
                tk.store(s.state[n][out.stage], narrow[n])
            tk.publish()
            s.states.commit(out)
            s.tokens.wait(ring)
            tk.load_T(b, s.b[ring.stage])
            s.ready.wait(ready)
            for n in cutlass.range_constexpr(2):
                tk.mma_AB(state[n], b, s.of_y[n][ready.stage])
            s.tokens.release(ring)
            tk.mma_wait(0)
            s.ready.release(ready)
            ring.advance()
            ready.advance()
            out.advance()

    @cute.jit
    def make_gradients(self, g, s, t):
        c = Gradient(tk.rt_fl(CHUNK), tk.rt_fl(CHUNK), tk.rt(CHUNK, self.dtype), tk.rt_fl(FEATURE_DIM),
                     (tk.rt_fl(FIRST), tk.rt_fl(COLUMNS - FIRST)), tk.rt_fl(MOMENTS), tk.rv(), tk.cv(CHUNK))
        ring, ready, states = s.tokens.ring(), s.ready.ring(), s.states.ring()
        for i in cutlass.range(t.chunks, unroll=1):
            chunk = self.order(t, i)
            s.tokens.wait(ring)
            tk.mm_ABt(c.s, s.x[ring.stage], s.y[ring.stage])
            tk.mm_ABt(c.d, s.a[ring.stage], s.b[ring.stage])
            self.moments.deltas(c, g, t, chunk)
            tk.mma_wait(0)
            tk.apply_narrow(c.w, lambda s, d, less: (d - less) * cute.math.fma(s, g.scale, Float32(1.0)), c.s, c.d,
                            self.moments.less(c))
            if const_expr(self.spec.reverse):
                tk.left_fill(c.w, 0, 0.0, diagonal=True)
            else:
                tk.right_fill(c.w, 1, 0.0, diagonal=True)
            s.ready.wait(ready)
            tk.mm_AB(c.near, c.w, s.of_y[0][ready.stage], b_part=0)
            self.moments.of_x(c.of_moments, s.moments, ready.stage)
            s.states.wait(states)
            for n in cutlass.range_constexpr(2):
                tk.mm_AB(c.far[n], s.a[ring.stage], s.state[n][states.stage])
            tk.mma_wait(0)
            s.ready.release(ready)
            s.states.release(states)
            self.put(g, t, c, features.Row(s.x[ring.stage]), chunk, i)
            s.tokens.release(ring)
            ring.advance()
            ready.advance()
            states.advance()

    def put(self, g, t, c, x, chunk, before):
        """A chunk's gradients to global memory: four neighbouring columns of a row from each thread."""
        far = chain.of_features(*c.far, x, self.dtype)
        _, back = features.tokens_near(before)
        rows = []
        for r in range(2):
            four = cute.make_rmem_tensor((4,), g.dx.element_type)
            for j in range(4):
                of_chunks_before = far[r][j] - self.moments.taken(c, r, j)
                four[j] = four.element_type((c.near.rows_view[r, j] * g.scale + of_chunks_before * back) * g.times)
            rows.append(four)
        self.store(g, t, rows, chunk)

    @cute.jit
    def store(self, g, t, rows, chunk):
        for r in cutlass.range_constexpr(2):
            token = chunk * CHUNK + tk.first_row() + 8 * r
            if token < g.tokens:
                row = g.dx[t.part, t.batch, token, t.head, None]
                at = row.iterator + 4 * (tk.lane_id() % 4)
                at = at.align(g.dx.element_type.width // 2)
                cute.autovec_copy(rows[r], cute.make_tensor(at, cute.make_layout(4)))
