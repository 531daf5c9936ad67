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
from tkq.linear_attention.hedgehog.query_side import SidePart
from tkq.linear_attention.hedgehog.query_tiles import Globals, Operands, Shared
from tkq.linear_attention.hedgehog.query_window import WindowPart
from tkq.linear_attention.hedgehog.sides import FEATURES, PARTS_TILE, SIDE_WARPS, SIDES
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type


class QueryGradients:
    """With f(x) = max(1e-6, (softmax(x W), softmax(-x W))), o the outputs, do their gradient, delta[i] = o[i] do[i],
    and of all tokens two chunks of 64 or more before i's: S = sum of f(k[j]) v[j]', s = sum of f(k[j])

        df[i] = S do[i] - delta[i] s,  less[i] = f(q[i]) df[i]
        dy = linear * inverse * df by the softmaxes' derivatives, dW = sum of q' dy
        e[i, j] = exp(q[i] k[j] / sqrt(D) - most[i]),  dp[i, j] = do[i] v[j]      of the window: i's chunk, that before
        ds = (window * inverse * e (dp - delta) - [e is largest] * share) / sqrt(D)
        dq = dy W' + ds K

    share and the factors' gradients are sums of rows: `window_rows`. A block has one head of one sequence and walks
    along its chunks. Two warpgroups have a side each, y or -y: of S 64 features by D in accumulators (fp32), which
    each chunk takes from shared memory, rounded, and dy's part. The third has the window, the keys of the chunk before
    first, as those of the chunk itself come last, and adds up dq. delta is the diagonal of O dO': each side makes it.

      producer (a warp)   maps; X A, Y B of a chunk | of the next | ..
      sides (2)           O A', S A' -> dy; f(Y) of the chunk before; W' += dy' X, S += f(Y)' B; X W of the next | ..
      window (1)          X Y', A B' of the chunk before, of the own: ds; dy W' + ds Y -> dq | ..
      sender (a warp)     dq | ..

      pipe      stages   full (arrivals)              empty (arrivals)
      maps      1        producer's bytes (1)         none
      queries   2        producer's bytes (1)         warps of sides and window (12): X; behind the last chunk zeros
      gradients 1        producer's bytes (1)         the same (12): A
      outputs   1        producer's bytes (1)         warps of the sides (8): O
      keys      2        producer's bytes (1)         the same (12), a chunk later: Y; first zeros, of no chunk
      values    2        producer's bytes (1)         the same (12), a chunk later: B; first zeros
      deltas    1        warps of the first side (4)  warps of the window (4)
      dys       1        warps of the sides (8)       warps of sides and window (12): dy and less of both sides
      outs      1        warps of the window (4)      sender (1): dq

    A side's features of keys lie where its S was, once all warps of both sides have multiplied by S, which dys tells;
    dq leaves by the room of ds.
    """

    def __init__(self, spec: GradientSpec, config: QueryConfig):
        self.spec, self.config, self.dtype = spec, config, element_type(spec.dtype)
        self.side, self.window = SidePart(spec, self.dtype), WindowPart(spec, self.dtype)
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
        maps = [operand(H, spec.head_dim, FEATURES) for _ in range(2)]
        inverse, most, delta, share = [fake.tensor("fp32", (B, S, H), align=4) for _ in range(4)]
        linear, window = [fake.tensor("fp32", (H,), align=4) for _ in range(2)]
        return q, (k, v, do, o, *maps, inverse, most, fake.tensor("fp32", (B, H), align=4), linear, window, dq, delta,
                   share, fake.tensor("fp32", (2, B, H, S), align=4),
                   fake.tensor("fp32", (B, H, spec.head_dim, FEATURES))), Float32(1.0)

    @cute.jit
    def __call__(self, q: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind q. scale: of exponents of 2, as the forward has it."""
        o = Operands(q, *others)
        # (batch, token, head, col) to (token, col, head, batch); (head, row, col) to (row, col, head)
        q, do, k, v, out, dq = [cute.make_tensor(z.iterator, cute.select(z.layout, [1, 3, 2, 0]))
                                for z in (o.q, o.do, o.k, o.v, o.o, o.dq)]
        maps = [cute.make_tensor(z.iterator, cute.select(z.layout, [1, 2, 0])) for z in (o.q_map, o.k_map)]
        g = Globals(*[tk.gl.load(z, self.x_tile) for z in (q, do, k, v)], *[tk.gl.load(z, self.map_tile) for z in maps],
                    tk.gl.load(out, self.x_tile), o.inverse, o.most, o.largest, o.linear, o.window,
                    tk.gl.store(dq, self.x_tile), o.delta, o.share, o.of_factors, o.dmap, scale, Int32(q.shape[0]))
        self.kernel(g).launch(grid=[q.shape[2], q.shape[3], 1], block=[(SIDES + 2) * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, x, all_warps = tk.SharedAllocator(), self.x_tile, SIDE_WARPS + WARPS
        out, state = al.tile(x), al.tile(self.state_tile, SIDES)
        if const_expr(self.spec.head_dim == 2 * CHUNK):
            ds, parts = out.scratch(self.f_tile), state.scratch(PARTS_TILE)
        else:
            ds, parts = al.tile(self.f_tile, 2), al.tile(PARTS_TILE, SIDES)
        s = Shared(al.tile(self.map_tile, 2), al.tile(x, 2), al.tile(x), al.tile(x, 2), al.tile(x, 2), al.tile(x),
                   state, state.scratch(self.f_tile), al.tile(self.f_tile, SIDES), ds, out, parts,
                   al.vector(FEATURES, SIDES), al.vector(CHUNK, SIDES), al.vector(CHUNK),
                   al.pipe(1, 2 * self.map_tile.bytes, WARPS), al.pipe(2, x.bytes, all_warps),
                   al.pipe(1, x.bytes, all_warps), al.pipe(1, x.bytes, SIDE_WARPS), al.pipe(2, x.bytes, all_warps),
                   al.pipe(2, x.bytes, all_warps), al.pipe(1, 0, WARPS, producers=WARPS),
                   al.pipe(1, 0, all_warps, producers=SIDE_WARPS), al.pipe(1, 0, 1, producers=WARPS))
        tk.init_block(lambda: [z.init() for z in (s.map_pipe, s.queries, s.gradients, s.outputs, s.keys, s.values,
                                                  s.deltas, s.dys, s.outs)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(g.tokens, CHUNK))
        few, many, some = self.config.registers
        tk.assign((tk.Role(lambda _: self.serve(g, s, t), few, warps=2),
                   tk.Role(lambda side: self.side.run(g, s, t, side), many, SIDES),
                   tk.Role(lambda _: self.window.run(g, s, t), some)))

    @cute.jit
    def serve(self, g, s, t):
        if tk.warp_id() == 0:
            self.produce(g, s, t)
        else:
            self.send(g, s, t)

    @cute.jit
    def send(self, g, s, t):
        outs = s.outs.ring()
        for i in cutlass.range(t.chunks, unroll=1):
            s.outs.wait(outs)
            tk.store_async(g.dx, s.out[0], (t.batch, t.head, i, 0))
            tk.store_wait()
            s.outs.release(outs)
            outs.advance()
        tk.store_wait(read=False)

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.x_map, g.y_map, g.x, g.a, g.o, g.y, g.b, g.dx)
        of_maps = s.map_pipe.acquire(s.map_pipe.ring())
        tk.load_async(s.maps[0], g.x_map, (t.head, 0, 0), of_maps)
        tk.load_async(s.maps[1], g.y_map, (t.head, 0, 0), of_maps)
        queries, gradients, outputs, keys, values = (
            pipe.ring() for pipe in (s.queries, s.gradients, s.outputs, s.keys, s.values))
        self.load(g.x, s.x, s.queries, queries, t, 0)
        self.load(g.y, s.y, s.keys, keys, t, t.chunks)
        self.load(g.b, s.b, s.values, values, t, t.chunks)
        for i in cutlass.range(t.chunks, unroll=1):
            self.load(g.o, s.o, s.outputs, outputs, t, i)
            self.load(g.a, s.a, s.gradients, gradients, t, i)
            self.load(g.b, s.b, s.values, values, t, i)
            self.load(g.y, s.y, s.keys, keys, t, i)
            self.load(g.x, s.x, s.queries, queries, t, i + 1)

    def load(self, g, tiles, pipe, ring, t, i):
        """Chunk i; behind the last one zeros."""
        tk.load_async(tiles[ring.stage], g, (t.batch, t.head, i, 0), pipe.acquire(ring))
        ring.advance()
