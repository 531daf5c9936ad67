"""The gradients of Hedgehog's queries in one launch: what comes of all that is before the window, and of the window."""
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import WARPS, QueryConfig
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.query_deltas import DELTA_WARPS, bring_numbers
from tkq.linear_attention.hedgehog.query_side import SidePart
from tkq.linear_attention.hedgehog.query_tiles import Globals, Operands, Shared
from tkq.linear_attention.hedgehog.query_window import WindowPart
from tkq.linear_attention.hedgehog.sides import (
    FEATURES,
    SIDE_WARPS,
    SIDES,
    fake_map_gradients,
    features_of_y,
    load_chunk,
    load_features,
)
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type


class QueryGradients:
    """With features f of queries and keys, as the forward keeps them, softmaxes p(x) = f(x) but where that is at its
    least, o the outputs, do their gradient, delta[i] = o[i] do[i], and of all tokens two chunks of 64 or more before
    i's: S = sum of f(k[j]) v[j]', s = sum of f(k[j])

        df[i] = S do[i] - delta[i] s,  less[i] = f(q[i]) df[i]
        dy = linear * inverse * df by the softmaxes' derivatives, dW = sum of q' dy
        e[i, j] = exp(q[i] k[j] / sqrt(D) - most[i]),  dp[i, j] = do[i] v[j]      of the window: i's chunk, that before
        ds = (window * inverse * e (dp - delta) - [e is largest] * share) / sqrt(D)
        dq = dy W' + ds K

    share and the factors' gradients are sums of rows: `window_rows`. A block has one head of one sequence and walks
    along its chunks. Two warpgroups have a side each, y or -y: of S 64 features by D in accumulators (fp32), which
    each chunk takes from shared memory, rounded, dy's part, and of dq and the map's gradient half of D. The third has
    the window, the keys of the chunk before first, as those of the chunk itself come last. delta is the diagonal of
    O dO', which two warps beside the producer make by small products; they bring rows' other numbers, too.

      producer (a warp)   map; O X of a chunk, its features, A B Y, features of the keys before | ..
      deltas (2 warps)    O A' | ..
      sides (2)           S A' -> dy; S += f(Y)' B of the chunk before, sums; W' += dy' X; dy W' + ds Y -> dq | ..
      window (1)          X Y', A B' of the chunk before, of the own: ds, less share | ..

      pipe       stages   full (arrivals)              empty (arrivals)
      map        1        producer's bytes (1)         none
      queries    2        producer's bytes (1)         warps of sides and window (12), of sides once dq has left: X
      gradients  1        producer's bytes (1)         the same, and of deltas (14): A
      outputs    1        producer's bytes (1)         warps of deltas (2): O
      keys       2        producer's bytes (1)         sides and window (12), a chunk later: Y; first zeros, of no chunk
      values     2        producer's bytes (1)         the same (12), a chunk later: B; first zeros
      x_features 1        producer's bytes (1)         the sides (8): features of X
      states     1        warps of the sides (8)       none: S has been read, by which features of keys lie
      y_features 1        producer's bytes (1)         the sides (8): features of the chunk before; first zeros
      deltas     1        warps of deltas (2)          sides and window (12)
      dys        1        warps of the sides (8)       sides and window (12): dy and less of both sides
      pairs      1        warps of the window (4)      the sides (8): ds

    dq leaves by the room of the queries that it is of, each side's half of the columns by itself.
    """

    def __init__(self, spec: GradientSpec, config: QueryConfig):
        self.spec, self.config, self.dtype = spec, config, element_type(spec.dtype)
        self.side, self.window = SidePart(spec, self.dtype), WindowPart(spec, self.dtype)
        self.x_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.half_tile = tk.st(CHUNK, spec.head_dim // SIDES, self.dtype)
        self.map_tile = tk.st(spec.head_dim, FEATURES, self.dtype)
        self.f_tile, self.state_tile = tk.st(CHUNK, FEATURES, self.dtype), tk.st(FEATURES, spec.head_dim, self.dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and H, and strides of rows that are multiples of 16 bytes."""
        spec, (B, S, H) = self.spec, (fake.sym() for _ in range(3))

        def operand(*shape):
            return fake.tensor(spec.dtype, shape, (*(fake.sym64(divisibility=8) for _ in shape[1:]), 1))

        q, k, v, do, o, dq = [operand(B, S, H, spec.head_dim) for _ in range(6)]
        features = [operand(B, S, H, SIDES * FEATURES) for _ in range(SIDES)]
        inverse, most, delta, share = [fake.tensor("fp32", (B, S, H), align=4) for _ in range(4)]
        linear, window = [fake.tensor("fp32", (H,), align=4) for _ in range(2)]
        return q, (k, v, do, o, operand(H, spec.head_dim, FEATURES), *features, inverse, most,
                   fake.tensor("fp32", (B, H), align=4), linear, window, dq, delta, share,
                   fake.tensor("fp32", (2, B, H, S), align=4),
                   fake_map_gradients(B, H, spec)), Float32(1.0)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind q. scale: of exponents of 2, as the forward has it."""
        o = Operands(q, *others)
        # (batch, token, head, col) to (token, col, head, batch); (head, row, col) to (row, col, head)
        q, do, k, v, out, dq, of_q, of_k = [
            cute.make_tensor(z.iterator, cute.select(z.layout, [1, 3, 2, 0]))
            for z in (o.q, o.do, o.k, o.v, o.o, o.dq, o.q_features, o.k_features)]
        x_map = cute.make_tensor(o.q_map.iterator, cute.select(o.q_map.layout, [1, 2, 0]))
        # all contiguous: a place is computed once for them
        inverse, most, delta, share = [cute.make_tensor(z.iterator, o.most.layout)
                                       for z in (o.inverse, o.most, o.delta, o.share)]
        g = Globals(*[tk.gl.load(z, self.x_tile) for z in (q, do, k, v)], tk.gl.load(x_map, self.map_tile),
                    *[tk.gl.load(z, self.f_tile) for z in (of_q, of_k)], tk.gl.load(out, self.x_tile), inverse,
                    most, o.largest, o.linear, o.window, tk.gl.store(dq, self.half_tile), delta, share, o.of_factors,
                    o.dmap, scale, Int32(q.shape[0]))
        self.kernel(g).launch(grid=[q.shape[2], q.shape[3], 1], block=[(SIDES + 2) * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, x, both, all_warps = tk.SharedAllocator(), self.x_tile, SIDES * self.f_tile.bytes, SIDE_WARPS + WARPS
        queries, state = al.tile(x, 2), al.tile(self.state_tile, SIDES)
        if const_expr(self.spec.head_dim == 2 * CHUNK):
            out = queries.scratch(self.half_tile)
        else:  # half of the columns are no tile's beginning
            out = al.tile(self.half_tile, 2 * SIDES)
        s = Shared(al.tile(self.map_tile), queries, al.tile(x), al.tile(x, 2), al.tile(x, 2), al.tile(x),
                   al.tile(self.f_tile, SIDES), state, state.scratch(self.f_tile), al.tile(self.f_tile, SIDES),
                   al.tile(self.f_tile, 2), out, al.vector(FEATURES, SIDES), al.vector(CHUNK, SIDES),
                   al.vector(CHUNK, 3), al.vector(SIDES), al.pipe(1, self.map_tile.bytes, WARPS),
                   al.pipe(2, x.bytes, all_warps), al.pipe(1, x.bytes, all_warps + DELTA_WARPS),
                   al.pipe(1, x.bytes, DELTA_WARPS), al.pipe(2, x.bytes, all_warps), al.pipe(2, x.bytes, all_warps),
                   al.pipe(1, both, SIDE_WARPS),
                   al.pipe(1, 0, 1, producers=SIDE_WARPS), al.pipe(1, both, SIDE_WARPS),
                   al.pipe(1, 0, all_warps, producers=DELTA_WARPS), al.pipe(1, 0, all_warps, producers=SIDE_WARPS),
                   al.pipe(1, 0, SIDE_WARPS, producers=WARPS))
        tk.init_block(lambda: [z.init() for z in (s.map_pipe, s.queries, s.gradients, s.outputs, s.keys, s.values,
                                                  s.x_features, s.states, s.y_features, s.deltas, s.dys, s.pairs)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(g.tokens, CHUNK))
        few, many, some = self.config.registers
        tk.assign((tk.Role(lambda _: self.serve(g, s, t), few, warps=1 + DELTA_WARPS),
                   tk.Role(lambda side: self.side.run(g, s, t, side), many, SIDES),
                   tk.Role(lambda _: self.window.run(g, s, t), some)))

    @cute.jit
    def serve(self, g, s, t):
        if tk.warp_id() == 0:
            self.produce(g, s, t)
        else:
            bring_numbers(g, s, t, tk.warp_id() - 1)

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.x_map, g.x, g.a, g.o, g.y, g.b, g.of_x, g.of_y, g.dx)
        tk.load_async(s.x_map[0], g.x_map, (t.head, 0, 0), s.map_pipe.acquire(s.map_pipe.ring()))
        queries, one, keys, values = (pipe.ring() for pipe in (s.queries, s.outputs, s.keys, s.values))
        load_chunk(g.y, s.y, s.keys, keys, t, t.chunks)
        load_chunk(g.b, s.b, s.values, values, t, t.chunks)
        for i in cutlass.range(t.chunks, unroll=1):
            tk.load_async(s.o[0], g.o, (t.batch, t.head, i, 0), s.outputs.acquire(one))
            load_chunk(g.x, s.x, s.queries, queries, t, i)
            load_features(g.of_x, [s.of_x[side] for side in range(SIDES)], s.x_features, one, t, i)
            tk.load_async(s.a[0], g.a, (t.batch, t.head, i, 0), s.gradients.acquire(one))
            load_chunk(g.b, s.b, s.values, values, t, i)
            load_chunk(g.y, s.y, s.keys, keys, t, i)
            s.states.wait(one)
            load_features(g.of_y, [features_of_y(s, side) for side in range(SIDES)], s.y_features, one, t,
                          cutlass.select_(i > 0, i - 1, t.chunks))
            one.advance()
