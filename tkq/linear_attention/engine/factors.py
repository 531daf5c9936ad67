"""What gates make of a chunk's tokens, by warps of their own: the part of `LinearAttention` that knows of these."""
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.linear_attention.engine.segmented import visited


class Factors:
    """A warp makes a chunk's factors while the scores' warpgroup, which makes those of one head itself, has the chunk
    before. Where a block has two heads it would make all others wait for both: there each has a warp beside the
    producer. They meet once a chunk, when its factors are there."""

    def __init__(self, gate: Any, barrier: int):
        """barrier: named, where they meet."""
        self.gate, self.heads, self.barrier = gate, gate.heads, barrier
        self.warps = gate.apart * gate.heads.count

    @cute.jit
    def beside(self, produce: Constexpr, g, s, t):
        """A warp runs `produce`, the others make factors."""
        if const_expr(self.warps == 0):
            produce(g, s, t)
        else:
            if tk.warp_id() % 4 == 0:
                produce(g, s, t)
            else:
                self.make(g, s, t)

    @cute.jit
    def make(self, g, s, t):
        """Of each chunk, by the warp of each head."""
        room, reverse = s.scores.ring(), self.gate.spec.reverse
        numbers = self.gate.first(g, t, visited(t, 0, reverse))
        for i in cutlass.range(t.chunks, unroll=1):
            logs = self.gate.logs(g, self.heads.of_warp(t), visited(t, i, reverse), numbers)
            self.gate.follow(g, t, visited(t, i + 1, reverse), numbers)
            s.scores.acquire_empty(room)
            self.gate.sums(g, logs, s.gate, self.heads.place_of_warp(room))
            self.meet()
            room.advance()

    def meet(self):
        """The scores' warpgroup, and the warps that have made factors."""
        tk.sync(self.barrier, tk.WARPGROUP + 32 * self.warps)
