"""The gradients of Hedgehog's queries in one launch: what comes of all that is before the window, and of the window."""
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import WARPS, FeatureConfig
from tkq.linear_attention.hedgehog.feature_state import FeatureState
from tkq.linear_attention.hedgehog.feature_tiles import FEATURES, SIDES, STATE_WARPS, Shared
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.queries_gradients import QueryPart
from tkq.linear_attention.hedgehog.spec import FeatureSpec
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type


class Operands(NamedTuple):
    """x, y, a, b: (B, S, H, D), queries, keys, do, values. x_map, y_map: (H, D, 64). o: outputs. inverse: (B, S, H)
    fp32. largest: (B, H) fp32. linear, window: factors, (H,) fp32. dx: (B, S, H, D). delta, less: (B, S, H) fp32, made
    here. of_factors: (2, B, H, S) fp32. dmap: (B, H, D, 64) fp32."""

    x: cute.Tensor
    y: cute.Tensor
    a: cute.Tensor
    b: cute.Tensor
    x_map: cute.Tensor
    y_map: cute.Tensor
    o: cute.Tensor
    inverse: cute.Tensor
    largest: cute.Tensor
    linear: cute.Tensor
    window: cute.Tensor
    dx: cute.Tensor
    delta: cute.Tensor
    less: cute.Tensor
    of_factors: cute.Tensor
    dmap: cute.Tensor


@dataclass(frozen=True)
class Globals:
    x: tk.gl
    y: tk.gl
    a: tk.gl
    b: tk.gl
    x_map: tk.gl
    y_map: tk.gl
    do: cute.Tensor  # a's rows, and those of outputs
    o: cute.Tensor
    inverse: cute.Tensor
    largest: cute.Tensor
    linear: cute.Tensor
    window: cute.Tensor
    dx: tk.gl
    delta: cute.Tensor
    less: cute.Tensor
    of_factors: cute.Tensor
    dmap: cute.Tensor
    scale: Float32
    tokens: Int32


class QueryGradients:
    """`feature_kernel.FeatureGradients` of queries and, in the same walk along the chunks, what
    `window_kernel.WindowGradients` has of queries: ds, dq += ds K, and the factors' gradients, by the same formulas.
    delta = o do is made here, too. dq leaves once, and no chunk's queries, keys, values and do come twice.

      producer (a warp)     maps; X of a chunk ahead; A B Y of a chunk | of the next | ..
      state (2)             S, s to shared memory; W' += dy' X of the chunk before; f(Y), S += f(Y)' B of that | ..
      gradients (1)         o do; X W, A S' -> dy; X Y', A B' of both chunks of keys -> ds; dy W' + ds Y | ..

    The gradients' warpgroup keeps nothing from one chunk to the next, so that the window's 64 scores and 64 products of
    a thread have the registers in which its features and their gradients were.

      pipe      stages   full (arrivals)              empty (arrivals)
      maps      1        producer's bytes (1)         none
      tokens    2        producer's bytes (1)         warps of state and gradients (12): X
      outputs   1        producer's bytes (1)         warps of the gradients (4): A
      others    2        producer's bytes (1)         warps of state and gradients (12), a chunk later: Y
      values    2        producer's bytes (1)         the same: B
      states    1        warps of the state (8)       warps of the gradients (4)
      dys       1        warps of the gradients (4)   warps of the state (8)

    A chunk before the first is the first once more, with weights of 0.
    """

    def __init__(self, spec: FeatureSpec, config: FeatureConfig):
        self.spec, self.config, self.dtype = spec, config, element_type(spec.dtype)
        self.state, self.gradients = FeatureState(spec), QueryPart(spec, self.dtype)
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
        linear, window = [fake.tensor("fp32", (H,), align=4) for _ in range(2)]
        return rows[0], (*rows[1:4], *maps, rows[4], inverse, fake.tensor("fp32", (B, H), align=4), linear, window,
                         rows[5], delta, less, fake.tensor("fp32", (2, B, H, S), align=4),
                         fake.tensor("fp32", (B, H, spec.head_dim, FEATURES))), Float32(1.0)

    @cute.jit
    def __call__(self, x: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind x. scale: of scores."""
        o = Operands(x, *others)
        # (batch, token, head, col) to (token, col, head, batch); (head, row, col) to (row, col, head)
        x, y, a, b, dx = [cute.make_tensor(z.iterator, cute.select(z.layout, [1, 3, 2, 0]))
                          for z in (o.x, o.y, o.a, o.b, o.dx)]
        maps = [cute.make_tensor(z.iterator, cute.select(z.layout, [1, 2, 0])) for z in (o.x_map, o.y_map)]
        g = Globals(*[tk.gl.load(z, self.x_tile) for z in (x, y, a, b)], *[tk.gl.load(z, self.map_tile) for z in maps],
                    o.a, o.o, o.inverse, o.largest, o.linear, o.window, tk.gl.store(dx, self.x_tile), o.delta, o.less,
                    o.of_factors, o.dmap, scale, Int32(x.shape[0]))
        self.kernel(g).launch(grid=[x.shape[2], x.shape[3], 1], block=[(SIDES + 2) * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, x = tk.SharedAllocator(), self.x_tile
        out = al.tile(x)
        ds = out.scratch(self.f_tile) if self.spec.head_dim == 2 * CHUNK else al.tile(self.f_tile, 2)
        s = Shared(al.tile(self.map_tile, 2), al.tile(x, 2), al.tile(x), al.tile(x, 2), al.tile(x, 2),
                   al.tile(self.f_tile, SIDES), al.tile(self.state_tile, SIDES), al.tile(self.f_tile), out,
                   al.vector(FEATURES, STATE_WARPS), al.vector(FEATURES, 2 * SIDES), al.vector(4),
                   al.pipe(1, 2 * self.map_tile.bytes, WARPS), al.pipe(2, x.bytes, STATE_WARPS + WARPS),
                   al.pipe(2, x.bytes, STATE_WARPS + WARPS), al.pipe(2, x.bytes, STATE_WARPS + WARPS),
                   al.pipe(1, 0, WARPS, producers=STATE_WARPS), al.pipe(1, 0, STATE_WARPS, producers=WARPS),
                   al.pipe(1, x.bytes, WARPS), ds)
        tk.init_block(lambda: [z.init() for z in (s.map_pipe, s.tokens, s.others, s.values, s.states, s.dys,
                                                  s.outputs)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(g.tokens, CHUNK))
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda side: self.state.run(g, s, t, side), some, SIDES),
                   tk.Role(lambda _: self.gradients.run(g, s, t), many)))

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.x_map, g.y_map, g.x, g.a, g.b, g.y)
        of_maps = s.map_pipe.acquire(s.map_pipe.ring())
        tk.load_async(s.maps[0], g.x_map, (t.head, 0, 0), of_maps)
        tk.load_async(s.maps[1], g.y_map, (t.head, 0, 0), of_maps)
        tokens, outputs, values, others = s.tokens.ring(), s.outputs.ring(), s.values.ring(), s.others.ring()
        tk.load_async(s.x[tokens.stage], g.x, (t.batch, t.head, 0, 0), s.tokens.acquire(tokens))
        for i in cutlass.range(t.chunks, unroll=1):
            tk.load_async(s.a[outputs.stage], g.a, (t.batch, t.head, i, 0), s.outputs.acquire(outputs))
            tk.load_async(s.b[values.stage], g.b, (t.batch, t.head, i, 0), s.values.acquire(values))
            tokens.advance()  # behind the last chunk zeros: there is a y of a next chunk, too
            tk.load_async(s.x[tokens.stage], g.x, (t.batch, t.head, i + 1, 0), s.tokens.acquire(tokens))
            tk.load_async(s.y[others.stage], g.y, (t.batch, t.head, i, 0), s.others.acquire(others))
            for ring in (outputs, values, others):
                ring.advance()
