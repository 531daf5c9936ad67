"""The features' part of the gradients of Hedgehog's attention: what comes of all that is before the window."""
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import WARPS, FeatureConfig
from tkq.linear_attention.hedgehog.feature_gradients import GradientPart
from tkq.linear_attention.hedgehog.feature_state import FeatureState
from tkq.linear_attention.hedgehog.feature_tiles import (
    FEATURES,
    SIDES,
    STATE_WARPS,
    Globals,
    Operands,
    Shared,
    visited,
)
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.spec import FeatureSpec
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type


class FeatureGradients:
    """With f(x) = max(1e-6, (softmax(x W), softmax(-x W))), do the outputs' gradient, w[i] = linear * inverse[i] what
    they have of keys before the window, and delta[i] = o[i] do[i], over tokens two chunks of 64 apart or more

        of queries   S = sum of f(k[j]) v[j]',           s = sum of f(k[j])                    over chunks before
                     df[i] = w[i] (S do[i] - delta[i] s),   less[i] = f(q[i]) (S do[i] - delta[i] s)
        of keys      S = sum of w[i] f(q[i]) do[i]',     s = sum of w[i] delta[i] f(q[i])      over chunks behind
                     df[j] = S v[j] - s,                    dv[j] = S' f(k[j])

    and from df by the softmaxes' derivatives dy, of which dx = dy W' and dW = sum of x' dy; less is what the factors'
    gradients begin with. A block has one head of one sequence, keys from the last chunk to the first. S (two sides of
    64 features by D, fp32) stays in accumulators; each chunk takes it from shared memory, rounded.

      producer (a warp)     maps; Y B of the chunk before, X A of a chunk | of the next | ..
      state (2)             S, s to shared memory; W' += dy' X of the chunk before; f(Y), S += f(Y)' B | ..
      gradients (1)         X W, A S' -> dy; dx, of keys f(X) S, to global memory | ..

      pipe      stages   full (arrivals)              empty (arrivals)
      maps      1        producer's bytes (1)         none
      tokens    2        producer's bytes (1)         warps of state and gradients (12): X A; of keys one of the
                                                      gradients' (9), a chunk later: dv takes the values' room
      others    1        producer's bytes (1)         warps of the state (8): Y
      values    2        producer's bytes (1)         the same: B
      states    1        warps of the state (8)       warps of the gradients (4)
      dys       1        warps of the gradients (4)   warps of the state (8)

    In float16 weights are divided by a power of 2 near the largest of the sequence, by which results are multiplied:
    there is room for weights that are all small. Sums lie in two places in turns: a chunk's are read to its end, and
    written over when the next one's state has been given back.
    """

    def __init__(self, spec: FeatureSpec, config: FeatureConfig):
        self.spec, self.config = spec, config
        self.dtype, self.keys = element_type(spec.dtype), spec.of == "keys"
        self.state, self.gradients = FeatureState(spec), GradientPart(spec, self.dtype)
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
        inverse, delta, less = [fake.tensor("fp32", (B, S, H), align=4) for _ in range(3)]
        largest, linear = fake.tensor("fp32", (B, H), align=4), fake.tensor("fp32", (H,), align=4)
        return rows[0], (*rows[1:4], *maps, inverse, delta, largest, linear, rows[4], rows[5] if self.keys else None,
                         None if self.keys else less, fake.tensor("fp32", (B, H, spec.head_dim, FEATURES)))

    @cute.jit
    def __call__(self, x: cute.Tensor, others: Any, stream: cuda.CUstream):
        """others: those of `Operands` behind x."""
        o = Operands(x, *others)
        # (batch, token, head, col) to (token, col, head, batch); (head, row, col) to (row, col, head)
        x, y, a, b, dx, dv = [z if z is None else cute.make_tensor(z.iterator, cute.select(z.layout, [1, 3, 2, 0]))
                              for z in (o.x, o.y, o.a, o.b, o.dx, o.dv)]
        maps = [cute.make_tensor(z.iterator, cute.select(z.layout, [1, 2, 0])) for z in (o.x_map, o.y_map)]
        put = tk.gl.add if self.spec.added else tk.gl.store
        g = Globals(*[tk.gl.load(z, self.x_tile) for z in (x, y, a, b)], *[tk.gl.load(z, self.map_tile) for z in maps],
                    o.inverse, o.delta, o.largest, o.linear, put(dx, self.x_tile),
                    dv if dv is None else put(dv, self.x_tile), o.less, o.dmap, Int32(x.shape[0]))
        self.kernel(g).launch(grid=[x.shape[2], x.shape[3], 1], block=[(SIDES + 2) * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, x = tk.SharedAllocator(), self.x_tile
        s = Shared(al.tile(self.map_tile, 2), al.tile(x, 2), al.tile(x, 2), al.tile(x), al.tile(x, 2),
                   al.tile(self.f_tile, SIDES), al.tile(self.state_tile, SIDES), al.tile(self.f_tile), al.tile(x),
                   al.vector(FEATURES, STATE_WARPS), al.vector(FEATURES, 2 * SIDES), al.vector(4),
                   al.pipe(1, 2 * self.map_tile.bytes, WARPS),
                   al.pipe(2, 2 * x.bytes, STATE_WARPS + (1 if self.keys else WARPS)),
                   al.pipe(1, x.bytes, STATE_WARPS), al.pipe(2, x.bytes, STATE_WARPS),
                   al.pipe(1, 0, WARPS, producers=STATE_WARPS), al.pipe(1, 0, STATE_WARPS, producers=WARPS))
        tk.init_block(lambda: [z.init() for z in (s.map_pipe, s.tokens, s.others, s.values, s.states, s.dys)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(g.tokens, CHUNK))
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda side: self.state.run(g, s, t, side), some, SIDES),
                   tk.Role(lambda _: self.gradients.run(g, s, t), many)))

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.x_map, g.y_map, g.x, g.a, g.y, g.b)
        of_maps = s.map_pipe.acquire(s.map_pipe.ring())
        tk.load_async(s.maps[0], g.x_map, (t.head, 0, 0), of_maps)
        tk.load_async(s.maps[1], g.y_map, (t.head, 0, 0), of_maps)
        tokens, others, values = s.tokens.ring(), s.others.ring(), s.values.ring()
        self.load_tokens(g, s, t, tokens, 0)
        for i in cutlass.range(1, t.chunks, unroll=1):
            before = visited(self.spec, t, i - 1)
            tk.load_async(s.y[others.stage], g.y, (t.batch, t.head, before, 0), s.others.acquire(others))
            tk.load_async(s.b[values.stage], g.b, (t.batch, t.head, before, 0), s.values.acquire(values))
            others.advance()
            values.advance()
            self.load_tokens(g, s, t, tokens, i)
        if const_expr(not self.keys):
            self.load_tokens(g, s, t, tokens, t.chunks)  # zeros: there is a y of a next chunk, too

    def load_tokens(self, g, s, t, tokens, i):
        at, sem = (t.batch, t.head, visited(self.spec, t, i), 0), s.tokens.acquire(tokens)
        tk.load_async(s.x[tokens.stage], g.x, at, sem)
        tk.load_async(s.a[tokens.stage], g.a, at, sem)
        tokens.advance()
