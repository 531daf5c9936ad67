"""The third warpgroup of the keys' kernel: it adds up dv, dk and the map's gradient."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

import tkq.tile as tk
from tkq.linear_attention.hedgehog.key_tiles import visited
from tkq.linear_attention.hedgehog.sides import near_power
from tkq.linear_attention.hedgehog.spec import GradientSpec
from tkq.linear_attention.hedgehog.weights import following

ROWS_BARRIER = 3  # the named barrier of the warpgroup


@dataclass(frozen=True)
class Sums:
    """Registers of a chunk's keys."""

    d: tk.RegTile  # dv, then dk
    dmap: tk.RegTile  # the map's gradient, transposed


class RowsPart:
    """Of 64 keys, from the last: dv, dk, their part of the map's gradient."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.spec, self.dtype = spec, dtype

    @cute.jit
    def run(self, g, s, t):
        D = self.spec.head_dim
        c = Sums(tk.rt_fl(D), tk.rt_fl(D))
        tk.zero(c.dmap)
        tokens = s.keys.ring()  # one count for all pipes
        s.map_pipe.wait(s.map_pipe.ring())
        s.queries.wait(s.queries.ring())
        s.gradients.wait(s.gradients.ring())
        _, power = near_power(self.spec, g, t)
        for i in cutlass.range(t.chunks, unroll=1):
            self.put_values(g, s, t, c, (tokens, i), power)
            self.put_keys(g, s, t, c, (tokens, i), power)
            tokens.advance()
        tk.mul(c.dmap, c.dmap, power)
        of_head = g.dmap[t.batch, t.head, None, None]
        tk.store_elements(cute.make_tensor(of_head.iterator, cute.select(of_head.layout, [1, 0])), c.dmap, 0, 0)
        if tk.first_warp_of_group():
            tk.store_wait(read=False)

    @cute.jit
    def put_values(self, g, s, t, c, where, power):
        """dv, by the room of P."""
        tokens, i = where
        one, behind, now = tk.Ring(tokens.count, 1), tokens, following(tokens)
        s.states.wait(one)
        s.x_features.wait(one)
        tk.mm_AB(c.d, s.of_x[0], s.state[0])
        tk.mma_AB(c.d, s.of_x[1], s.state[1])
        tk.mma_wait(0)
        s.read.commit(one)
        s.x_features.release(one)
        if const_expr(self.spec.dtype != "bf16"):
            tk.mul(c.d, c.d, power)
        s.gradients.wait(now)
        s.pairs.wait(one)
        tk.mma_AtB(c.d, s.p[0], s.b[now.stage])
        tk.mma_AtB(c.d, s.p[1], s.b[behind.stage])
        tk.mma_wait(0)
        s.gradients.release(behind)
        tk.sync(ROWS_BARRIER, tk.WARPGROUP)  # P has been read
        tk.store(s.dv[0], c.d)
        tk.publish()
        tk.sync(ROWS_BARRIER, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(g.dv, s.dv[0], (t.batch, t.head, visited(t, i), 0))

    @cute.jit
    def put_keys(self, g, s, t, c, where, power):
        """dk, by the room of its keys; the map's gradient."""
        tokens, i = where
        one, behind, now = tk.Ring(tokens.count, 1), tokens, following(tokens)
        s.queries.wait(now)
        s.dys.wait(one)
        s.keys.wait(tokens)
        if const_expr(self.spec.dtype == "bf16"):  # queries first, as the next ones are waited for soonest
            self.multiply_pairs(s, c, (now, behind), tk.mm_AtB)
            self.multiply_map(s, c, tk.mma_ABt)
        else:
            self.multiply_map(s, c, tk.mm_ABt)
            tk.mma_wait(0)
            tk.mul(c.d, c.d, power)
            self.multiply_pairs(s, c, (now, behind), tk.mma_AtB)
        tk.mma_AtB(c.dmap, s.dy[0], s.x[tokens.stage])
        tk.mma_AtB(c.dmap, s.dy[1], s.x[tokens.stage])
        tk.mma_wait(4 if self.spec.dtype == "bf16" else 2)
        s.queries.release(behind)
        tk.mma_wait(0)
        s.dys.release(one)
        tk.sync(ROWS_BARRIER, tk.WARPGROUP)  # keys have been read
        tk.store(s.x[tokens.stage], c.d)
        tk.publish()
        tk.sync(ROWS_BARRIER, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(g.dx, s.x[tokens.stage], (t.batch, t.head, visited(t, i), 0))
            tk.store_wait()
        s.pairs.release(one)
        s.keys.release(tokens)

    def multiply_pairs(self, s, c, rings, product):
        now, behind = rings
        product(c.d, s.ds[0], s.y[now.stage])
        tk.mma_AtB(c.d, s.ds[1], s.y[behind.stage])

    def multiply_map(self, s, c, product):
        product(c.d, s.dy[0], s.x_map[0])
        tk.mma_ABt(c.d, s.dy[1], s.x_map[0])
