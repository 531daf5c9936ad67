"""The producer warp of caches whose pages are multiples of 64 rows: tiles by TMA, for one block or two at a time."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla.producer import announce
from tkq.attention.mla.tiles import own

LANES = 4  # words of 16 rows each that say which rows of a tile are there


class BulkProducer:
    """A tile is a panel of 64 columns at a time; with multicast each block of a cluster loads its rows for both.

    Rows behind the sequence's end come as they are: the warpgroups of values clear them. Pages that are not there come
    as zeros, from behind the cache's end."""

    def __init__(self, spec, config):
        self.walk, self.dtype = Walk(spec), tk.element_type(spec.dtype)

    @cute.jit
    def run(self, g, smem):
        left, right, rope = [pipe.ring() for pipe in (smem.left_pipe, smem.right_pipe, smem.rope_pipe)]
        announced = smem.segment_pipe.ring()
        at = self.walk.begin(g)
        while at[X] < at[END]:
            s = own(g, self.walk.segment(g, at))
            if s.first < s.end:
                slot = announced.stage
                announce(smem, announced, (s.first, s.end, s.batch, s.tile, s.length, Int32(s.inside), s.splits,
                                           self.walk.slot(g, s, s.split)))
                self.note(smem, slot, Int32(0))
                page = self.find(g, s, s.first)
                for block in cutlass.range(s.first, s.end, unroll=1):
                    there = (page >= 0) & (page < g.k.shape[0])
                    fault = (page < -1) | (page >= g.k.shape[0])
                    rows = self.rows(s, block, there)
                    at_row = (block * ROWS) % g.page_size // ROWS
                    here = cutlass.select_(there, page, Int32(g.k.shape[0]))
                    page = self.find(g, s, block + 1)
                    if fault:
                        self.blame(g, smem, slot)
                    smem.left_pipe.acquire_empty(left)
                    self.tell(smem.there, left.stage, rows)
                    self.load(g, smem.left, smem.left_pipe, left, (here, at_row, 0))
                    smem.rope_pipe.acquire_empty(rope)
                    self.load(g, smem.rope, smem.rope_pipe, rope, (here, at_row, 8))
                    smem.right_pipe.acquire_empty(right)
                    self.tell(smem.bad, right.stage, rows)
                    self.load(g, smem.right, smem.right_pipe, right, (here, at_row, 4))
            self.walk.advance(g, at, s)
        announce(smem, announced, (Int32(-1),))

    @cute.jit
    def find(self, g, s, block):
        """The page of a block of keys; -1 where the sequence has none."""
        page = Int32(-1)
        if block * ROWS < s.length:
            page = g.table[s.batch, block * ROWS // g.page_size]
        return page

    def rows(self, s, block, there):
        """Bits of this lane's 16 rows, of the first lanes."""
        left = cutlass.min(cutlass.max(s.length - block * ROWS - 16 * tk.lane_id(), 0), 16)
        return cutlass.select_(there, (Int32(1) << left) - 1, Int32(0))

    @cute.jit
    def tell(self, places, stage, rows):
        if tk.lane_id() < LANES:
            places[tk.lane_id(), stage] = rows
        cute.arch.sync_warp()

    def load(self, g, tile, pipe, ring, place):
        page, row, column = place
        tk.expect_bytes(pipe.full[ring.stage], pipe.bytes)
        panels = tile.type.cols // 64
        boxes = tile.scratch(tk.st(ROWS, 64, self.dtype))
        for panel in range(panels):
            tk.load_async(boxes[ring.stage * panels + panel], g.latent, (page, row, column + panel),
                          pipe.full[ring.stage])
        ring.advance()

    @cute.jit
    def note(self, smem, slot, value):
        faults = smem.faults
        if tk.lane_id() < LANES:
            faults[tk.lane_id(), slot] = value
        cute.arch.sync_warp()

    @cute.jit
    def blame(self, g, smem, slot):
        plan = g.plan
        self.note(smem, slot, Int32(1))
        if tk.lane_id() == 0:
            plan[words.BAD_PAGE] = Int32(1)
