"""The features' part of the gradients of Hedgehog's attention: what comes of all that is before the window."""
from dataclasses import dataclass
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.column_sums import lane_column, warp_columns
from tkq.linear_attention.hedgehog.config import FeatureConfig
from tkq.linear_attention.hedgehog.features import LEAST, softmax
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.spec import FeatureSpec
from tkq.linear_attention.hedgehog.window_kernel import WARPS, put
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type

FEATURES = 64  # columns of a map
SIDES = 2  # features of y, of -y: a warpgroup each has their state
STATE_WARPS = SIDES * WARPS
STATE_BARRIER, GRADIENTS_BARRIER = 1, 3  # named barriers: of the state's warpgroups (one each), of the gradients'


class Operands(NamedTuple):
    """x, y: (B, S, H, D), queries and keys; of keys: keys and queries. a, b: do and v; of keys: v and do. x_map, y_map:
    (H, D, 64). inverse, delta: (B, S, H) fp32. largest: (B, H, 4) fp32. linear: (H,) fp32. dx, dv: (B, S, H, D), to be
    added to; dv: of keys, or None. dlinear: (B, S, H) fp32 of queries, or None. dmap: (B, H, D, 64) fp32."""

    x: cute.Tensor
    y: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor
    x_map: cute.Tensor
    y_map: cute.Tensor
    inverse: cute.Tensor
    delta: cute.Tensor
    largest: cute.Tensor
    linear: cute.Tensor
    dx: cute.Tensor
    dv: Optional[cute.Tensor]
    dlinear: Optional[cute.Tensor]
    dmap: cute.Tensor


@dataclass(frozen=True)
class Globals:
    x: tk.gl
    y: tk.gl
    a: tk.gl
    b: tk.gl
    x_map: tk.gl
    y_map: tk.gl
    inverse: cute.Tensor
    delta: cute.Tensor
    largest: cute.Tensor
    linear: cute.Tensor
    dx: tk.gl
    dv: Optional[tk.gl]
    dlinear: Optional[cute.Tensor]
    dmap: cute.Tensor
    tokens: Int32


@dataclass(frozen=True)
class Shared:
    maps: tk.SharedTile  # x's, y's
    x: tk.SharedTile
    a: tk.SharedTile
    y: tk.SharedTile
    b: tk.SharedTile
    of_y: tk.SharedTile  # features of each side
    state: tk.SharedTile  # of each side, rounded: 64 features by D
    dy: tk.SharedTile
    out: tk.SharedTile
    parts: cute.Tensor  # of each warp of the state: what a chunk adds to sums
    sums: cute.Tensor  # of features, of each side, for two chunks
    map_pipe: tk.Pipe
    tokens: tk.Pipe
    others: tk.Pipe
    values: tk.Pipe
    states: tk.Pipe
    dys: tk.Pipe


@dataclass(frozen=True)
class State:
    """Registers of one side's 64 features."""

    sum: tk.RegTile  # features by D
    dmap: tk.RegTile  # the map's gradient, transposed: its columns by half of D
    e: tk.RegTile
    row: tk.RowVec
    weight: tk.RowVec
    delta: tk.RowVec
    total: cute.Tensor  # of a feature of the first 64 threads each: the sum over tokens


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


class FeatureGradients:
    """With f(x) = max(1e-6, (softmax(x W), softmax(-x W))), do the outputs' gradient, w[i] = linear * inverse[i] what
    they have of keys before the window, and delta[i] = o[i] do[i], over tokens two chunks of 64 apart or more

        of queries   S = sum of f(k[j]) v[j]',           s = sum of f(k[j])                    over chunks before
                     df[i] = w[i] (S do[i] - delta[i] s),   dlinear[i] = f(q[i]) df[i] / linear
        of keys      S = sum of w[i] f(q[i]) do[i]',     s = sum of w[i] delta[i] f(q[i])      over chunks behind
                     df[j] = S v[j] - s,                    dv[j] = S' f(k[j])

    and from df by the softmaxes' derivatives dy, of which dx = dy W' and dW = sum of x' dy: dx and dv are added to what
    the window has given. A block has one head of one sequence, keys from the last chunk to the first. S (two sides of
    64 features by D, fp32) stays in accumulators; each chunk takes it from shared memory, rounded.

      producer (a warp)     maps; Y B of the chunk before, X A of a chunk | of the next | ..
      state (2)             S, s to shared memory; W' += dy' X of the chunk before; f(Y), S += f(Y)' B | ..
      gradients (1)         X W, A S' -> dy; dx, of keys f(X) S: added in global memory | ..

      pipe      stages   full (arrivals)              empty (arrivals)
      maps      1        producer's bytes (1)         none
      tokens    2        producer's bytes (1)         warps of state and gradients (12): X A
      others    1        producer's bytes (1)         warps of the state (8): Y
      values    2        producer's bytes (1)         the same: B
      states    1        warps of the state (8)       warps of the gradients (4)
      dys       1        warps of the gradients (4)   warps of the state (8)

    Weights are divided by a power of 2 near the largest of the sequence, by which results are multiplied: float16 has
    room for weights that are all small. Sums lie in two places in turns: a chunk's are read to its end, and written
    over when the next one's state has been given back.
    """

    def __init__(self, spec: FeatureSpec, config: FeatureConfig):
        self.spec, self.config = spec, config
        self.dtype, self.keys = element_type(spec.dtype), spec.of == "keys"
        self.x_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.map_tile = tk.st(spec.head_dim, FEATURES, self.dtype)
        self.f_tile, self.state_tile = tk.st(CHUNK, FEATURES, self.dtype), tk.st(FEATURES, spec.head_dim, self.dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and H, and strides of rows that are multiples of 16 bytes."""
        spec, (B, S, H) = self.spec, (fake.sym() for _ in range(3))

        def operand(*shape):
            return fake.tensor(spec.dtype, shape, (*(fake.sym64(divisibility=8) for _ in shape[1:]), 1))

        rows = [operand(B, S, H, spec.head_dim) for _ in range(6)]
        maps = [operand(H, spec.head_dim, FEATURES) for _ in range(2)]
        inverse, delta, dlinear = [fake.tensor("fp32", (B, S, H), align=4) for _ in range(3)]
        largest, linear = fake.tensor("fp32", (B, H, WARPS), align=4), fake.tensor("fp32", (H,), align=4)
        return (Operands(*rows[:4], *maps, inverse, delta, largest, linear, rows[4], rows[5] if self.keys else None,
                         None if self.keys else dlinear, fake.tensor("fp32", (B, H, spec.head_dim, FEATURES))),)

    @cute.jit
    def __call__(self, operands: Operands, stream: cuda.CUstream):
        # (batch, token, head, col) to (token, col, head, batch); (head, row, col) to (row, col, head)
        o = operands
        x, y, a, b, dx, dv = [z if z is None else cute.make_tensor(z.iterator, cute.select(z.layout, [1, 3, 2, 0]))
                              for z in (o.x, o.y, o.a, o.b, o.dx, o.dv)]
        maps = [cute.make_tensor(z.iterator, cute.select(z.layout, [1, 2, 0])) for z in (o.x_map, o.y_map)]
        g = Globals(*[tk.gl.load(z, self.x_tile) for z in (x, y, a, b)], *[tk.gl.load(z, self.map_tile) for z in maps],
                    o.inverse, o.delta, o.largest, o.linear, tk.gl.add(dx, self.x_tile),
                    dv if dv is None else tk.gl.add(dv, self.x_tile), o.dlinear, o.dmap, Int32(x.shape[0]))
        self.kernel(g).launch(grid=[x.shape[2], x.shape[3], 1], block=[(SIDES + 2) * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, x = tk.SharedAllocator(), self.x_tile
        s = Shared(al.tile(self.map_tile, 2), al.tile(x, 2), al.tile(x, 2), al.tile(x), al.tile(x, 2),
                   al.tile(self.f_tile, SIDES), al.tile(self.state_tile, SIDES), al.tile(self.f_tile), al.tile(x),
                   al.vector(FEATURES, STATE_WARPS), al.vector(FEATURES, 2 * SIDES),
                   al.pipe(1, 2 * self.map_tile.bytes, WARPS), al.pipe(2, 2 * x.bytes, STATE_WARPS + WARPS),
                   al.pipe(1, x.bytes, STATE_WARPS), al.pipe(2, x.bytes, STATE_WARPS),
                   al.pipe(1, 0, WARPS, producers=STATE_WARPS), al.pipe(1, 0, STATE_WARPS, producers=WARPS))
        tk.init_block(lambda: [z.init() for z in (s.map_pipe, s.tokens, s.others, s.values, s.states, s.dys)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(g.tokens, CHUNK))
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda side: self.keep_state(g, s, t, side), some, SIDES),
                   tk.Role(lambda _: self.make_gradients(g, s, t), many)))

    def order(self, t, i):
        """The i-th chunk that is visited."""
        return t.chunks - 1 - i if self.keys else i

    def power(self, g, t):
        """(1 / p, p): a power of 2 near the largest weight of keys before the window."""
        largest = g.largest[t.batch, t.head, 0]
        for warp in range(1, WARPS):
            largest = cute.arch.fmax(largest, g.largest[t.batch, t.head, warp])
        bits = (largest * g.linear[t.head]).bitcast(Int32) & Int32(0x7F800000)
        bits = cutlass.max(bits, Int32(0x00800000))  # not 0
        return (Int32(0x7F000000) - bits).bitcast(Float32), bits.bitcast(Float32)

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.x_map, g.y_map, g.x, g.a, g.y, g.b)
        of_maps = s.map_pipe.acquire(s.map_pipe.ring())
        tk.load_async(s.maps[0], g.x_map, (t.head, 0, 0), of_maps)
        tk.load_async(s.maps[1], g.y_map, (t.head, 0, 0), of_maps)
        tokens, others, values = s.tokens.ring(), s.others.ring(), s.values.ring()
        self.load_tokens(g, s, t, tokens, 0)
        for i in cutlass.range(1, t.chunks, unroll=1):
            before = self.order(t, i - 1)
            tk.load_async(s.y[others.stage], g.y, (t.batch, t.head, before, 0), s.others.acquire(others))
            tk.load_async(s.b[values.stage], g.b, (t.batch, t.head, before, 0), s.values.acquire(values))
            others.advance()
            values.advance()
            self.load_tokens(g, s, t, tokens, i)

    def load_tokens(self, g, s, t, tokens, i):
        at, sem = (t.batch, t.head, self.order(t, i), 0), s.tokens.acquire(tokens)
        tk.load_async(s.x[tokens.stage], g.x, at, sem)
        tk.load_async(s.a[tokens.stage], g.a, at, sem)
        tokens.advance()

    # ---- the state's warpgroups ----------------------------------------------------------------

    @cute.jit
    def keep_state(self, g, s, t, side):
        D = self.spec.head_dim
        c = State(tk.rt_fl(D), tk.rt_fl(D // 2), tk.rt_fl(FEATURES), tk.rv(), tk.rv(), tk.rv(),
                  cute.make_rmem_tensor((1,), Float32))
        tk.zero(c.sum)
        tk.zero(c.dmap)
        c.total[0] = Float32(0.0)
        less, _ = self.power(g, t)
        scale = g.linear[t.head] * less
        states, before = s.states.ring(), s.tokens.ring()
        one = tk.Ring(before.count, 1)  # of the chunk before, in pipes of a stage
        s.map_pipe.wait(s.map_pipe.ring())
        self.put_state(s, c, side, states, 0)
        for i in cutlass.range(1, t.chunks, unroll=1):
            self.put_state(s, c, side, states, i)
            self.add_map(s, c, side, (before, one))
            self.add_others(g, s, t, c, side, (before, one), i - 1, scale)
            before.advance()
        self.add_map(s, c, side, (before, one))
        _, power = self.power(g, t)  # once more: a register less in the loop
        tk.mul(c.dmap, c.dmap, power)
        of_head = g.dmap[t.batch, t.head, None, None]
        transposed = cute.make_tensor(of_head.iterator, cute.select(of_head.layout, [1, 0]))
        tk.store_elements(transposed, c.dmap, 0, side * (D // 2))

    @cute.jit
    def put_state(self, s, c, side, states, i):
        """What chunk i has of those before: of all up to i - 2."""
        sums, total = s.sums, c.total
        s.states.acquire_empty(states)
        tk.store(s.state[side], c.sum)
        if tk.thread_in_warpgroup() < FEATURES:
            sums[tk.thread_in_warpgroup(), i % 2 * SIDES + side] = total[0]
        tk.publish()
        s.states.commit(states)
        states.advance()

    def add_map(self, s, c, side, rings):
        """Of the map's gradient half of the rows, which the chunk before has."""
        tokens, dys = rings
        s.tokens.wait(tokens)
        s.dys.wait(dys)
        tk.mma_AtB(c.dmap, s.dy[0], s.x[tokens.stage], b_part=side)
        tk.mma_wait(0)
        s.dys.release(dys)
        s.tokens.release(tokens)

    @cute.jit
    def add_others(self, g, s, t, c, side, rings, i, scale):
        (values, others), parts, total = rings, s.parts, c.total
        self.ask(g, t, c, self.order(t, i))
        s.others.wait(others)
        tk.mm_AB(c.e, s.y[others.stage], s.maps[1])
        tk.mma_wait(0)
        s.others.release(others)
        softmax(c.e, c.row, c.e, Float32(cutlass.select_(side == 0, Float32(1.0), Float32(-1.0))))
        tk.apply(c.e, lambda z: cutlass.select_(z < LEAST, Float32(LEAST), z), c.e)
        if const_expr(self.keys):
            tk.mul(c.weight, c.weight, scale)
            tk.mul_row(c.e, c.e, c.weight)
        self.put_features(s, c, side)
        tk.publish()
        tk.sync(STATE_BARRIER + side, tk.WARPGROUP)
        if tk.thread_in_warpgroup() < FEATURES:
            for warp in cutlass.range_constexpr(WARPS):
                total[0] = total[0] + parts[tk.thread_in_warpgroup(), WARPS * side + warp]
        s.values.wait(values)
        tk.mma_AtB(c.sum, s.of_y[side], s.b[values.stage])
        tk.mma_wait(0)
        s.values.release(values)
        tk.sync(STATE_BARRIER + side, tk.WARPGROUP)  # features and parts have been read

    def ask(self, g, t, c, chunk):
        """Rows' numbers: weight is 0 past the last token, delta what their features are summed up with."""
        if not self.keys:
            tk.fill(c.delta, 1.0)
            return
        for to, x in ((c.weight, g.inverse), (c.delta, g.delta)):
            tk.load_rows(to, x[t.batch, None, t.head], chunk * CHUNK, g.tokens)
        for r in range(2):
            there = chunk * CHUNK + tk.first_row() + 8 * r < g.tokens
            c.weight.tensor[r] = cutlass.select_(there, c.weight.tensor[r], Float32(0.0))

    def put_features(self, s, c, side):
        tk.store(s.of_y[side], c.e)
        for n, found in enumerate(warp_columns(c.e, c.delta)):
            s.parts[lane_column() + n, WARPS * side + tk.warp_id() % WARPS] = found

    # ---- the gradients' warpgroup --------------------------------------------------------------

    @cute.jit
    def make_gradients(self, g, s, t):
        D, dtype = self.spec.head_dim, self.dtype
        c = Gradient(tk.rt_fl(FEATURES), tk.rt_fl(FEATURES), tuple(tk.rt_fl(FEATURES) for _ in range(SIDES)),
                     tk.rt(FEATURES, dtype), tuple(tk.rt(FEATURES, dtype) for _ in range(SIDES)), tk.rt_fl(D),
                     tk.rt_fl(D), *[tk.rv() for _ in range(5)])
        less, power = self.power(g, t)
        scale = g.linear[t.head] * less
        tokens, states, dys = s.tokens.ring(), s.states.ring(), s.dys.ring()
        s.map_pipe.wait(s.map_pipe.ring())
        for i in cutlass.range(t.chunks, unroll=1):
            chunk = self.order(t, i)
            if const_expr(not self.keys):
                tk.load_rows(c.inverse, g.inverse[t.batch, None, t.head], chunk * CHUNK, g.tokens)
                tk.load_rows(c.delta, g.delta[t.batch, None, t.head], chunk * CHUNK, g.tokens)
            s.tokens.wait(tokens)
            tk.mm_AB(c.y, s.x[tokens.stage], s.maps[0])
            s.states.wait(states)
            for side in cutlass.range_constexpr(SIDES):
                tk.mm_ABt(c.d[side], s.a[tokens.stage], s.state[side])
            tk.mma_wait(2)
            softmax(c.e, c.row, c.y, 1.0)
            tk.mma_wait(0)
            s.tokens.release(tokens)
            tk.zero(c.far)
            self.add_side(s, c, c.e, 0, i)
            softmax(c.y, c.row, c.y, -1.0)
            self.add_side(s, c, c.y, 1, i)
            if const_expr(self.keys):
                tk.copy(c.dy, c.d[0])
                tk.mm_AB(c.dv, c.of_x[0], s.state[0])
                tk.mma_AB(c.dv, c.of_x[1], s.state[1])
            else:
                s.states.release(states)
                self.put_linear(g, t, c, chunk)
                tk.mul(c.inverse, c.inverse, scale)
                tk.apply_narrow(c.dy, lambda d, w: d * w, c.d[0], c.inverse)
            s.dys.acquire_empty(dys)
            tk.store(s.dy[0], c.dy)
            tk.publish()
            s.dys.commit(dys)
            at = t.batch, t.head, chunk, 0
            if const_expr(self.keys):
                tk.mma_wait(0)
                s.states.release(states)
                tk.mul(c.dv, c.dv, power)
                put(g.dv, s.out[0], c.dv, at, GRADIENTS_BARRIER)
            tk.mm_ABt(c.dx, c.dy, s.maps[0])
            tk.mma_wait(0)
            tk.mul(c.dx, c.dx, power)
            put(g.dx, s.out[0], c.dx, at, GRADIENTS_BARRIER)
            for ring in (tokens, states, dys):
                ring.advance()
        tk.store_wait(read=False)

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

    def put_linear(self, g, t, c, chunk):
        """The gradient of the factor, of each token."""
        tk.quad_sum(c.far)
        tk.mul(c.far, c.far, c.inverse)
        tk.store_rows(g.dlinear[t.batch, None, t.head], c.far, chunk * CHUNK, g.tokens)
