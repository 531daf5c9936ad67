"""What gates make of a chunk's tokens, by warps of their own: the part of `LinearAttention` that knows of these."""
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Uint32, const_expr

import tkq.tile as tk
from tkq.linear_attention.engine.ping_pong import ScorePingPong
from tkq.linear_attention.engine.segmented import visited


class FactorWarps:
    """With two heads a block's scores would wait for the factors of both. So each head has a warp beside the producer
    that makes its factors, one chunk ahead. These warps and the scores' warpgroup share a named barrier, once a chunk:
    there factors are handed over.

    A launch that makes states alone (`plan.factors_alone`) waits for nothing but factors, and for those of a chunk
    longer than the state works with it. So each warp of the scores' warpgroup makes those of every fourth chunk, or, of
    two heads, of its head's every second one."""

    def __init__(self, gate: Any, barrier: int, ping_pong: ScorePingPong):
        """barrier: the number of the first scores' warpgroup's. count: of the warps beside the producer; 0 where warps
        of the scores make the factors."""
        self.gate, self.heads, self.ping_pong, self.barrier = gate, gate.heads, ping_pong, barrier
        self.count = gate.own_warps * gate.heads.count

    @cute.jit
    def beside(self, produce: Constexpr, g, s, t):
        """The first warp runs `produce`, the others make factors."""
        if const_expr(self.count == 0):
            produce(g, s, t)
        else:
            if tk.warp_id() % 4 == 0:
                produce(g, s, t)
            else:
                self.make(g, s, t, 0)

    @cute.jit
    def make(self, g, s, t, wg):
        """Of the chunks that are this warp's, of the head that is."""
        room, reverse, every = s.scores.ring(), self.gate.spec.reverse, self.heads.every
        first = self.heads.first_chunk()
        room.count[0] = Uint32(first)
        numbers = self.gate.first(g, t, visited(t, first, reverse))
        for i in cutlass.range(first, t.chunks, every, unroll=1):
            logs = self.gate.logs(g, self.heads.of_warp(t), visited(t, i, reverse), numbers)
            self.gate.follow(g, t, visited(t, i + every, reverse), numbers)
            s.scores.acquire_empty(room)
            self.gate.sums(g, logs, s.gate, self.heads.place_of_warp(room))
            if const_expr(self.heads.all_warps):
                s.scores.commit(room)
            else:
                self.meet(wg)
            for _ in cutlass.range_constexpr(every):
                room.advance()

    def meet(self, wg):
        """A chunk's factors are there: all that share the barrier. wg: of scores."""
        tk.sync(self.ping_pong.barrier(self.barrier, wg), tk.WARPGROUP + 32 * self.count)
