"""dQ policies "atomic" and "bulk": every block adds its part of a tile, in whatever order, to an accumulator that
begins with zeroes."""
import cutlass.cute as cute
from cutlass import Constexpr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.dq_tile import DqTile


class AddDq:
    """What a dQ warpgroup does with one tile, where it adds: from registers (atomic), through shared memory (bulk)."""

    def __init__(self, config: BackwardConfig, tile: DqTile, scheduler):
        self.config, self.tile, self.scheduler = config, tile, scheduler

    @cute.jit
    def add_tile(self, g, s, t, dq, ring, head, m):
        """Tile m of a query head, when its dS is there."""
        s.ds_pipe.wait(ring)
        self.add(g, s, dq, ring, self.scheduler.tile_number(g, t, head, m))
        ring.advance()

    @cute.jit
    def add(self, g, s, dq, ring, number, last: Constexpr = lambda: None):
        """The accumulator's tile ``number`` += dS K. ``last()`` when dS and K have been read."""
        self.tile.each_part(g, s, dq, ring, number, lambda address: self.add_part(s, dq, address), last)

    def add_part(self, s, dq, address):
        """From registers, or by way of shared memory."""
        if self.config.dq_reduce == "bulk":
            warp = tk.warp_id() % 4
            self.tile.send_rows(s.dq[None, None, None, warp], dq,
                                lambda src, size: tk.bulk_add(address + warp * size, src, size))
        else:
            x, quads = dq.tensor, self.config.dq_cols // 8
            mine = address + tk.warp_id() % 4 * (quads * 512) + tk.lane_id() * 16
            for j in range(quads):
                tk.red_add4(mine + j * 512, *[x[4 * j + e] for e in range(4)])
