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
from tkq.linear_attention.hedgehog.query_rows import RowsPart
from tkq.linear_attention.hedgehog.query_side import SidePart
from tkq.linear_attention.hedgehog.query_tiles import Globals, Operands, Shared
from tkq.linear_attention.hedgehog.sides import FEATURES, SIDE_WARPS, SIDES, features_of_y
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.linear_attention.hedgehog.weights import following
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
    each chunk takes from shared memory, rounded, and dy's part; and of the window the chunk's own keys, or those of the
    chunk before. delta is the diagonal of O dO': each makes it. The third adds up dq, the map's gradient, and what
    rows have given.

      producer (a warp)   map; O A Y B of a chunk, its features, those of keys before, X of the next | ..
      sides (2)           X Y', O A'; A B': ds; S A' -> dy; S += f(Y)' B of the chunk before, sums | ds less share | ..
      rows (1)            share; ds Y, dy W' -> dq; W' += dy' X | ..

      pipe       stages   full (arrivals)              empty (arrivals)
      map        1        producer's bytes (1)         none
      queries    2        producer's bytes (1)         warps of sides and rows (12), these once dq has left: X
      gradients  1        producer's bytes (1)         warps of the sides (8): A
      outputs    1        producer's bytes (1)         the same (8): O
      keys       3        producer's bytes (1)         sides and rows (12), a chunk later: Y; first zeros, of no chunk
      values     2        producer's bytes (1)         the sides (8), a chunk later: B; first zeros
      x_features 1        producer's bytes (1)         the same (8): features of X, in the room of O
      states     1        warps of the sides (8)       none: S has been read, by which features of keys lie
      y_features 1        producer's bytes (1)         the same (8): features of the chunk before; first zeros
      dys        1        warps of the sides (8)       warps of rows (4): dy of both, sums of rows
      shares     1        warps of rows (4)            none: there are no new sums before all sides have taken it
      pairs      1        warps of the sides (8)       warps of rows (4): ds, less share

    dq leaves by the room of the queries that it is of.
    """

    def __init__(self, spec: GradientSpec, config: QueryConfig):
        self.spec, self.config, self.dtype = spec, config, element_type(spec.dtype)
        self.side, self.rows = SidePart(spec, self.dtype), RowsPart(spec, self.dtype)
        self.x_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
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
                   fake.tensor("fp32", (B, H, spec.head_dim, FEATURES))), Float32(1.0)

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
                    most, o.largest, o.linear, o.window, tk.gl.store(dq, self.x_tile), delta, share, o.of_factors,
                    o.dmap, scale, Int32(q.shape[0]))
        self.kernel(g).launch(grid=[q.shape[2], q.shape[3], 1], block=[(SIDES + 2) * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, x, both, all_warps = tk.SharedAllocator(), self.x_tile, SIDES * self.f_tile.bytes, SIDE_WARPS + WARPS
        out, state = al.tile(x), al.tile(self.state_tile, SIDES)
        in_place = self.spec.head_dim == 2 * CHUNK
        of_x = out.scratch(self.f_tile) if const_expr(in_place) else al.tile(self.f_tile, SIDES)
        s = Shared(al.tile(self.map_tile), al.tile(x, 2), al.tile(x), al.tile(x, 3), al.tile(x, 2), out, of_x, state,
                   state.scratch(self.f_tile), al.tile(self.f_tile, SIDES), al.tile(self.f_tile, 2),
                   al.vector(FEATURES, SIDES), al.vector(CHUNK, 5),
                   al.pipe(1, self.map_tile.bytes, WARPS), al.pipe(2, x.bytes, all_warps),
                   al.pipe(1, x.bytes, SIDE_WARPS), al.pipe(1, x.bytes, SIDE_WARPS), al.pipe(3, x.bytes, all_warps),
                   al.pipe(2, x.bytes, SIDE_WARPS), al.pipe(1, both, SIDE_WARPS),
                   al.pipe(1, 0, 1, producers=SIDE_WARPS), al.pipe(1, both, SIDE_WARPS),
                   al.pipe(1, 0, WARPS, producers=SIDE_WARPS), al.pipe(1, 0, SIDE_WARPS, producers=WARPS),
                   al.pipe(1, 0, WARPS, producers=SIDE_WARPS))
        tk.init_block(lambda: [z.init() for z in (s.map_pipe, s.queries, s.gradients, s.outputs, s.keys, s.values,
                                                  s.x_features, s.states, s.y_features, s.dys, s.shares, s.pairs)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(g.tokens, CHUNK))
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda side: self.side.run(g, s, t, side), some, SIDES),
                   tk.Role(lambda _: self.rows.run(g, s, t), many)))

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.x_map, g.x, g.a, g.o, g.y, g.b, g.of_x, g.of_y, g.dx)
        tk.load_async(s.x_map[0], g.x_map, (t.head, 0, 0), s.map_pipe.acquire(s.map_pipe.ring()))
        queries, one, keys, values = (pipe.ring() for pipe in (s.queries, s.outputs, s.keys, s.values))
        self.load(g.x, s.x, s.queries, queries, t, 0)
        self.load(g.y, s.y, s.keys, keys, t, t.chunks)
        self.load(g.b, s.b, s.values, values, t, t.chunks)
        self.load(g.y, s.y, s.keys, keys, t, 0)
        for i in cutlass.range(t.chunks, unroll=1):
            s.x_features.acquire_empty(one)  # those of the chunk before have left the room of O
            tk.load_async(s.o[0], g.o, (t.batch, t.head, i, 0), s.outputs.acquire(one))
            tk.load_async(s.a[0], g.a, (t.batch, t.head, i, 0), s.gradients.acquire(one))
            self.load(g.b, s.b, s.values, values, t, i)
            s.outputs.acquire_empty(following(one))  # O has been read
            self.load_features(g.of_x, [s.of_x[side] for side in range(SIDES)], s.x_features, one, t, i)
            s.states.wait(one)
            self.load_features(g.of_y, [features_of_y(s, side) for side in range(SIDES)], s.y_features, one, t,
                               cutlass.select_(i > 0, i - 1, t.chunks))
            self.load(g.x, s.x, s.queries, queries, t, i + 1)
            self.load(g.y, s.y, s.keys, keys, t, i + 1)
            one.advance()

    def load(self, g, tiles, pipe, ring, t, i):
        """Chunk i; behind the last one zeros."""
        tk.load_async(tiles[ring.stage], g, (t.batch, t.head, i, 0), pipe.acquire(ring))
        ring.advance()

    def load_features(self, g, tiles, pipe, ring, t, i):
        """Of both sides."""
        sem = pipe.acquire(ring)
        for side in range(SIDES):
            tk.load_async(tiles[side], g, (t.batch, t.head, i, side), sem)
