"""The gradients of Hedgehog's keys and values in one launch: what comes of all behind the window, and of the window."""
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.config import WARPS, KeyConfig
from tkq.linear_attention.hedgehog.kernel import Task
from tkq.linear_attention.hedgehog.key_side import SidePart
from tkq.linear_attention.hedgehog.key_tiles import Globals, Operands, Shared, visited
from tkq.linear_attention.hedgehog.key_window import WindowPart
from tkq.linear_attention.hedgehog.sides import FEATURES, PARTS_TILE, SIDE_WARPS, SIDES
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.runtime.compile import fake
from tkq.tile.dtypes import element_type


class KeyGradients:
    """With f(x) = max(1e-6, (softmax(x W), softmax(-x W))), w[i] = linear * inverse[i], and of all tokens two chunks of
    64 or more behind j's: S = sum of w[i] f(q[i]) do[i]', s = sum of w[i] delta[i] f(q[i])

        df[j] = S v[j] - s, dy = df by the softmaxes' derivatives, dW = sum of k' dy
        e[i, j] = exp(q[i] k[j] / sqrt(D) - most[i]),  dp[i, j] = do[i] v[j]      of the window: j's chunk, that behind
        p = window * inverse * e,  ds = (p (dp - delta) - [the score is most] * share) / sqrt(D)
        dk = dy W' + ds' Q,  dv = S' f(k) + p' dO

    inverse and most are the forward's, delta and share the launch's for queries. A block has one head of one sequence
    and walks along its chunks, from the last to the first. Two warpgroups have a side each, y or -y: of S 64 features
    by D in accumulators (fp32), which each chunk takes from shared memory, rounded, and dy's part; and dv of half of D.
    The third has the window, the queries of the chunk behind first, and adds up dk and the map's gradient.

      producer (a warp)   maps; A, Y B, X of a chunk | of the next | ..
      sides (2)           S A' -> dy; f(X) S -> dv; f(Y), S += f(Y)' B of the chunk behind; dv += P' B; X W | ..
      window (1)          Y X', B A' of the chunk behind, of the own: P, ds; ds' Y + dy W' -> dk; W' += dy' X | ..

      pipe      stages   full (arrivals)              empty (arrivals)
      maps      1        producer's bytes (1)         none
      keys      2        producer's bytes (1)         warps of sides and window (12): X; behind the last chunk zeros
      values    1        producer's bytes (1)         the same (12): A
      queries   2        producer's bytes (1)         the same (12), a chunk later: Y; first zeros, of no chunk
      gradients 2        producer's bytes (1)         the same (12), a chunk later: B; first zeros
      pairs     1        warps of the window (4)      a warp of each side (2), once dv has left P's room
      dys       1        warps of the sides (8)       warps of the window (4): dy of both sides

    The sides meet three times a chunk: when features and states of both are there, which dv takes half of the columns
    of; when they have been read, so that dy takes the features' place, and features of queries the states'; and when P
    has been read, which dv takes the place of.
    """

    def __init__(self, spec: GradientSpec, config: KeyConfig):
        self.spec, self.config, self.dtype = spec, config, element_type(spec.dtype)
        self.side, self.window = SidePart(spec, self.dtype), WindowPart(spec, self.dtype)
        self.x_tile = tk.st(CHUNK, spec.head_dim, self.dtype)
        self.map_tile = tk.st(spec.head_dim, FEATURES, self.dtype)
        self.f_tile, self.state_tile = tk.st(CHUNK, FEATURES, self.dtype), tk.st(FEATURES, spec.head_dim, self.dtype)
        self.half_tile = tk.st(CHUNK, spec.head_dim // SIDES, self.dtype)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any B, S and H, and strides of rows that are multiples of 16 bytes."""
        spec, (B, S, H) = self.spec, (fake.sym() for _ in range(3))

        def operand(*shape):
            return fake.tensor(spec.dtype, shape, (*(fake.sym64(divisibility=8) for _ in shape[1:]), 1))

        k, q, v, do, dk, dv = [operand(B, S, H, spec.head_dim) for _ in range(6)]
        maps = [operand(H, spec.head_dim, FEATURES) for _ in range(2)]
        numbers = [fake.tensor("fp32", (B, S, H), align=4) for _ in range(4)]
        linear, window = [fake.tensor("fp32", (H,), align=4) for _ in range(2)]
        return k, (q, v, do, *maps, *numbers, fake.tensor("fp32", (B, H), align=4), linear, window, dk, dv,
                   fake.tensor("fp32", (B, H, spec.head_dim, FEATURES))), Float32(1.0)

    @cute.jit
    def __call__(self, k: cute.Tensor, others: Any, scale: Float32, stream: cuda.CUstream):
        """others: those of `Operands` behind k. scale: of exponents of 2, as the forward has it."""
        o = Operands(k, *others)
        # (batch, token, head, col) to (token, col, head, batch); (head, row, col) to (row, col, head)
        k, v, q, do, dk, dv = [cute.make_tensor(z.iterator, cute.select(z.layout, [1, 3, 2, 0]))
                               for z in (o.k, o.v, o.q, o.do, o.dk, o.dv)]
        maps = [cute.make_tensor(z.iterator, cute.select(z.layout, [1, 2, 0])) for z in (o.k_map, o.q_map)]
        g = Globals(*[tk.gl.load(z, self.x_tile) for z in (k, v, q, do)], *[tk.gl.load(z, self.map_tile) for z in maps],
                    o.inverse, o.most, o.delta, o.share, o.largest, o.linear, o.window, tk.gl.store(dk, self.x_tile),
                    tk.gl.store(dv, self.half_tile), o.dmap, scale, Int32(k.shape[0]))
        self.kernel(g).launch(grid=[k.shape[2], k.shape[3], 1], block=[(SIDES + 2) * tk.WARPGROUP, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        al, x, all_warps = tk.SharedAllocator(), self.x_tile, SIDE_WARPS + WARPS
        out, state, p = al.tile(x), al.tile(self.state_tile, SIDES), al.tile(self.f_tile, 2)
        if const_expr(self.spec.head_dim == 2 * CHUNK):
            ds, parts = out.scratch(self.f_tile), state.scratch(PARTS_TILE)
        else:
            ds, parts = al.tile(self.f_tile, 2), al.tile(PARTS_TILE, SIDES)
        s = Shared(al.tile(self.map_tile, 2), al.tile(x, 2), al.tile(x), al.tile(x, 2), al.tile(x, 2), state,
                   state.scratch(self.f_tile), parts, al.tile(self.f_tile, SIDES), p, p.scratch(self.half_tile), ds,
                   out, al.vector(FEATURES, SIDES), al.pipe(1, 2 * self.map_tile.bytes, WARPS),
                   al.pipe(2, x.bytes, all_warps), al.pipe(1, x.bytes, all_warps), al.pipe(2, x.bytes, all_warps),
                   al.pipe(2, x.bytes, all_warps), al.pipe(1, 0, SIDES, producers=WARPS),
                   al.pipe(1, 0, WARPS, producers=SIDE_WARPS))
        tk.init_block(lambda: [z.init() for z in (s.map_pipe, s.keys, s.values, s.queries, s.gradients, s.pairs,
                                                  s.dys)])
        head, batch, _ = cute.arch.block_idx()
        t = Task(batch, head, cute.ceil_div(g.tokens, CHUNK))
        few, some, many = self.config.registers
        tk.assign((tk.Role(lambda _: self.produce(g, s, t), few, warps=1),
                   tk.Role(lambda side: self.side.run(g, s, t, side), some, SIDES),
                   tk.Role(lambda _: self.window.run(g, s, t), many)))

    @cute.jit
    def produce(self, g, s, t):
        tk.prefetch(g.x_map, g.y_map, g.x, g.a, g.y, g.b, g.dx, g.dv)
        of_maps = s.map_pipe.acquire(s.map_pipe.ring())
        tk.load_async(s.maps[0], g.x_map, (t.head, 0, 0), of_maps)
        tk.load_async(s.maps[1], g.y_map, (t.head, 0, 0), of_maps)
        keys, values, queries, gradients = (pipe.ring() for pipe in (s.keys, s.values, s.queries, s.gradients))
        self.load(g.x, s.x, s.keys, keys, t, visited(t, 0))
        self.load(g.y, s.y, s.queries, queries, t, t.chunks)
        self.load(g.b, s.b, s.gradients, gradients, t, t.chunks)
        for i in cutlass.range(t.chunks, unroll=1):
            chunk = visited(t, i)
            self.load(g.a, s.a, s.values, values, t, chunk)
            self.load(g.b, s.b, s.gradients, gradients, t, chunk)
            self.load(g.y, s.y, s.queries, queries, t, chunk)
            self.load(g.x, s.x, s.keys, keys, t, self.there(t, chunk - 1))

    def there(self, t, chunk):
        """A chunk, or one behind the last, whose tiles are zeros."""
        return cutlass.select_(chunk >= 0, chunk, t.chunks)

    def load(self, g, tiles, pipe, ring, t, i):
        """Chunk i; behind the last one zeros."""
        tk.load_async(tiles[ring.stage], g, (t.batch, t.head, i, 0), pipe.acquire(ring))
        ring.advance()
