"""The gradients of Hedgehog's keys and values in one launch: what comes of all behind the window, and of the window."""
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import WARPS, KeyConfig
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.key_rows import RowsPart
from tkq.linear_attention.hedgehog.key_side import SidePart
from tkq.linear_attention.hedgehog.key_tiles import Globals, Operands, Shared, visited
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


class KeyGradients:
    """With features f of queries and keys, as the forward keeps them, softmaxes p(x) = f(x) but where that is at its
    least, w[i] = linear * inverse[i], and of all tokens two chunks of 64 or more behind j's: S = sum of
    w[i] f(q[i]) do[i]', s = sum of w[i] delta[i] f(q[i])

        df[j] = S v[j] - s, dy = df by the softmaxes' derivatives, dW = sum of k' dy
        e[i, j] = exp(q[i] k[j] / sqrt(D) - most[i]),  dp[i, j] = do[i] v[j]      of the window: j's chunk, that behind
        P = window * inverse * e,  ds = (P (dp - delta) - [the score is most] * share) / sqrt(D)
        dk = dy W' + ds' Q,  dv = S' f(k) + P' dO

    inverse and most are the forward's, delta and share the launch's for queries. A block has one head of one sequence
    and walks along its chunks, from the last to the first. Two warpgroups have a side each, y or -y: of S 64 features
    by D in accumulators (fp32), which each chunk takes from shared memory, rounded, and dy's part; and of the window
    the queries of the chunk itself, or those of the chunk behind. The third adds up dv, then dk, and the map's
    gradient.

      producer (a warp)   map; A B Y of a chunk, its features, those of queries behind, X of the next | ..
      sides (2)           S A' -> dy; Y X', B A': P, ds; S += (w f(Y))' B of the chunk behind, sums | ..
      rows (1)            f(X) S, P' B -> dv; ds' Y, dy W' -> dk; W' += dy' X | ..

      pipe       stages   full (arrivals)              empty (arrivals)
      map        1        producer's bytes (1)         none
      keys       2        producer's bytes (1)         warps of sides and rows (12), these once dk has left: X
      values     1        producer's bytes (1)         warps of the sides (8): A
      queries    2        producer's bytes (1)         sides and rows (12), a chunk later: Y; first zeros, of no chunk
      gradients  2        producer's bytes (1)         the same (12), a chunk later: B; first zeros
      x_features 1        producer's bytes (1)         the same (12): features of X; of the last chunk zeros, like S
      states     1        warps of the sides (8)       none: S is there
      read       1        warps of sides and rows (12) none: S has been read, by which features of queries lie
      y_features 1        producer's bytes (1)         warps of the sides (8): of the chunk behind; first zeros
      dys        1        warps of the sides (8)       warps of rows (4): dy of both sides
      pairs      1        warps of the sides (8)       warps of rows (4), once dv has left: P and ds

    dk leaves by the room of the keys that it is of, dv by that of P.
    """

    def __init__(self, spec: GradientSpec, config: KeyConfig):
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

        k, q, v, do, dk, dv = [operand(B, S, H, spec.head_dim) for _ in range(6)]
        features = [operand(B, S, H, SIDES * FEATURES) for _ in range(SIDES)]
        numbers = [fake.tensor("fp32", (B, S, H), align=4) for _ in range(4)]
        linear, window = [fake.tensor("fp32", (H,), align=4) for _ in range(2)]
        return k, (q, v, do, operand(H, spec.head_dim, FEATURES), *features, *numbers,
                   fake.tensor("fp32", (B, H), align=4), linear, window, dk, dv,
                   fake_map_gradients(B, H, spec)), Float32(1.0)

    @cute.jit
    def __call__(self, k: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind k. scale: of exponents of 2, as the forward has it."""
        o = Operands(k, *others)
        # (batch, token, head, col) to (token, col, head, batch); (head, row, col) to (row, col, head)
        k, v, q, do, of_k, of_q, dk, dv = [
            cute.make_tensor(z.iterator, cute.select(z.layout, [1, 3, 2, 0]))
            for z in (o.k, o.v, o.q, o.do, o.k_features, o.q_features, o.dk, o.dv)]
        x_map = cute.make_tensor(o.k_map.iterator, cute.select(o.k_map.layout, [1, 2, 0]))
        # all contiguous: a place is computed once for them
        numbers = [cute.make_tensor(z.iterator, o.most.layout) for z in (o.inverse, o.most, o.delta, o.share)]
        g = Globals(*[tk.gl.load(z, self.x_tile) for z in (k, v, q, do)], tk.gl.load(x_map, self.map_tile),
                    *[tk.gl.load(z, self.f_tile) for z in (of_k, of_q)], *numbers, o.largest,
                    o.linear, o.window, *[tk.gl.store(z, self.x_tile) for z in (dk, dv)], o.dmap, scale,
                    Int32(k.shape[0]))
        self.kernel(g).launch(grid=[k.shape[2], k.shape[3], 1], block=[(SIDES + 2) * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, x, both, all_warps = tk.SharedAllocator(), self.x_tile, SIDES * self.f_tile.bytes, SIDE_WARPS + WARPS
        state, p = al.tile(self.state_tile, SIDES), al.tile(self.f_tile, 2)
        s = Shared(al.tile(self.map_tile), al.tile(x, 2), al.tile(x), al.tile(x, 2), al.tile(x, 2),
                   al.tile(self.f_tile, SIDES), state, state.scratch(self.f_tile), al.tile(self.f_tile, SIDES), p,
                   p.scratch(x), al.tile(self.f_tile, 2), al.vector(FEATURES, SIDES), al.vector(CHUNK, 2 * SIDES),
                   al.pipe(1, self.map_tile.bytes, WARPS), al.pipe(2, x.bytes, all_warps),
                   al.pipe(1, x.bytes, SIDE_WARPS), al.pipe(2, x.bytes, all_warps), al.pipe(2, x.bytes, all_warps),
                   al.pipe(1, both, all_warps), al.pipe(1, 0, WARPS, producers=SIDE_WARPS),
                   al.pipe(1, 0, 1, producers=all_warps), al.pipe(1, both, SIDE_WARPS),
                   al.pipe(1, 0, WARPS, producers=SIDE_WARPS), al.pipe(1, 0, WARPS, producers=SIDE_WARPS))
        tk.init_block(lambda: [z.init() for z in (s.map_pipe, s.keys, s.values, s.queries, s.gradients, s.x_features,
                                                  s.states, s.read, s.y_features, s.dys, s.pairs)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(g.tokens, CHUNK))
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda side: self.side.run(g, s, t, side), some, SIDES),
                   tk.Role(lambda _: self.rows.run(g, s, t), many)))

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.x_map, g.x, g.a, g.y, g.b, g.of_x, g.of_y, g.dx, g.dv)
        tk.load_async(s.x_map[0], g.x_map, (t.head, 0, 0), s.map_pipe.acquire(s.map_pipe.ring()))
        keys, one, queries, gradients = (pipe.ring() for pipe in (s.keys, s.values, s.queries, s.gradients))
        load_chunk(g.x, s.x, s.keys, keys, t, visited(t, 0))
        load_chunk(g.y, s.y, s.queries, queries, t, t.chunks)
        load_chunk(g.b, s.b, s.gradients, gradients, t, t.chunks)
        for i in cutlass.range(t.chunks, unroll=1):
            chunk = visited(t, i)
            tk.load_async(s.a[0], g.a, (t.batch, t.head, chunk, 0), s.values.acquire(one))
            load_features(g.of_x, [s.of_x[side] for side in range(SIDES)], s.x_features, one, t,
                          cutlass.select_(i > 0, chunk, t.chunks))
            load_chunk(g.b, s.b, s.gradients, gradients, t, chunk)
            load_chunk(g.y, s.y, s.queries, queries, t, chunk)
            s.read.wait(one)
            load_features(g.of_y, [features_of_y(s, side) for side in range(SIDES)], s.y_features, one, t,
                          chunk + 1)
            if i + 1 < t.chunks:
                load_chunk(g.x, s.x, s.keys, keys, t, chunk - 1)
            one.advance()
