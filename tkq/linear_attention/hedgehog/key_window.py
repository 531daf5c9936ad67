"""The window of the keys' kernel: the part that has its scores, and adds up dk and the map's gradient."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.key_tiles import visited
from tkq.linear_attention.hedgehog.query_rows import anew
from tkq.linear_attention.hedgehog.sides import near_power
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.linear_attention.hedgehog.weights import following
from tkq.linear_attention.hedgehog.window_rows import LN2

WINDOW_BARRIER = 3  # the named barrier of the warpgroup


@dataclass(frozen=True)
class Window:
    """Registers of a chunk's pairs with 64 queries, and of its keys' gradients."""

    x: tk.RegTile
    dp: tk.RegTile
    dk: tk.RegTile
    dmap: tk.RegTile  # the map's gradient, transposed
    most: tk.RowVec  # of no token: such rows weigh nothing
    scaled: tk.RowVec  # the same, as an exponent of 2
    weight: tk.RowVec  # window * inverse
    delta: tk.RowVec
    share: tk.RowVec


class WindowPart:
    """Of 64 keys after the others, from the last: P and ds, dk; the map's gradient."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def run(self, g, s, t):
        D = self.spec.head_dim
        c = Window(tk.rt_fl(CHUNK), tk.rt_fl(CHUNK), tk.rt_fl(D), tk.rt_fl(D), *[tk.rv() for _ in range(5)])
        tk.zero(c.dmap)
        tokens = s.keys.ring()  # one count for all pipes
        s.map_pipe.wait(s.map_pipe.ring())
        s.queries.wait(s.queries.ring())
        s.gradients.wait(s.gradients.ring())
        self.ask(g, t, c, visited(t, 0) + 1)
        self.take(g, t, c, visited(t, 0) + 1)
        for i in cutlass.range(t.chunks, unroll=1):
            self.make_pairs(g, s, t, c, tokens, i)
            self.put_keys(g, s, t, c, tokens, i)
            tokens.advance()
        tk.mul(c.dmap, c.dmap, near_power(self.spec, g, t)[1])
        of_head = g.dmap[t.batch, t.head, None, None]
        tk.store_elements(cute.make_tensor(of_head.iterator, cute.select(of_head.layout, [1, 0])), c.dmap, 0, 0)
        tk.store_wait(read=False)

    @cute.jit
    def make_pairs(self, g, s, t, c, tokens, i):
        """P and ds of a chunk's keys, with the queries behind, whose numbers are still there, and with its own."""
        one, behind, now = tk.Ring(tokens.count, 1), tokens, following(tokens)
        s.keys.wait(tokens)
        s.values.wait(one)
        tk.mm_ABt(c.x, s.y[behind.stage], s.x[tokens.stage])
        tk.mm_ABt(c.dp, s.b[behind.stage], s.a[0])
        if tk.warp_id() % 4 == 0:
            tk.store_wait()
        tk.sync(WINDOW_BARRIER, tk.WARPGROUP)  # dk of the chunk behind has left the room of ds
        s.pairs.acquire_empty(one)
        tk.mma_wait(0)
        self.put_pairs(g, s, c, 1)
        self.ask(g, anew(t), c, visited(t, i))
        s.queries.wait(now)
        s.gradients.wait(now)
        tk.mm_ABt(c.x, s.y[now.stage], s.x[tokens.stage])
        tk.mm_ABt(c.dp, s.b[now.stage], s.a[0])
        tk.mma_wait(0)
        s.values.release(one)
        s.gradients.release(behind)
        self.take(g, t, c, visited(t, i))
        tk.right_fill(c.x, 1, -Float32.inf, diagonal=True)
        self.put_pairs(g, s, c, 0)
        tk.publish()
        s.pairs.commit(one)
        tk.sync(WINDOW_BARRIER, tk.WARPGROUP)

    def ask(self, g, t, c, chunk):
        """Numbers of a chunk's queries, which come while products run."""
        for to, x in ((c.most, g.most), (c.weight, g.inverse), (c.delta, g.delta), (c.share, g.share)):
            tk.load_rows(to, x[t.batch, None, t.head], chunk * CHUNK, g.tokens)

    def take(self, g, t, c, chunk):
        """The same as pairs take them."""
        for r in range(2):
            there = chunk * CHUNK + tk.first_row() + 8 * r < g.tokens
            c.most.tensor[r] = cutlass.select_(there, c.most.tensor[r], Float32.inf)
        tk.mul(c.scaled, c.most, g.scale)
        tk.mul(c.weight, c.weight, g.window[t.head])

    def put_pairs(self, g, s, c, n):
        p, ds, scale = tk.rt(CHUNK, self.dtype), tk.rt(CHUNK, self.dtype), g.scale * LN2

        def both(score, d, most, scaled, weight, delta, share):
            one = cute.math.exp2(score * g.scale - scaled, fastmath=True) * weight
            less = cutlass.select_(score == most, share, Float32(0.0))
            return one, scale * (one * (d - delta) - less)

        tk.apply_narrow((p, ds), both, c.x, c.dp, c.most, c.scaled, c.weight, c.delta, c.share)
        tk.store(s.p[n], p)
        tk.store(s.ds[n], ds)

    @cute.jit
    def put_keys(self, g, s, t, c, tokens, i):
        """dk to global memory; the map's gradient meanwhile."""
        one, behind, now, maps = tk.Ring(tokens.count, 1), tokens, following(tokens), s.maps
        if const_expr(self.spec.dtype == "bf16"):
            tk.mm_AtB(c.dk, s.ds[0], s.y[now.stage])
            tk.mma_AtB(c.dk, s.ds[1], s.y[behind.stage])
            s.dys.wait(one)
            tk.mma_ABt(c.dk, s.dy[0], maps[0])
            tk.mma_ABt(c.dk, s.dy[1], maps[0])
        else:
            s.dys.wait(one)
            tk.mm_ABt(c.dk, s.dy[0], maps[0])
            tk.mma_ABt(c.dk, s.dy[1], maps[0])
            tk.mma_wait(0)
            tk.mul(c.dk, c.dk, near_power(self.spec, g, t)[1])
            tk.mma_AtB(c.dk, s.ds[0], s.y[now.stage])
            tk.mma_AtB(c.dk, s.ds[1], s.y[behind.stage])
        tk.mma_AtB(c.dmap, s.dy[0], s.x[tokens.stage])
        tk.mma_AtB(c.dmap, s.dy[1], s.x[tokens.stage])
        tk.mma_wait(2)
        s.queries.release(behind)
        tk.sync(WINDOW_BARRIER, tk.WARPGROUP)  # ds has been read
        tk.store(s.out[0], c.dk)
        tk.publish()
        tk.mma_wait(0)
        s.dys.release(one)
        s.keys.release(tokens)
        tk.sync(WINDOW_BARRIER, tk.WARPGROUP)
        if tk.warp_id() % 4 == 0:
            tk.store_async(g.dx, s.out[0], (t.batch, t.head, visited(t, i), 0))
