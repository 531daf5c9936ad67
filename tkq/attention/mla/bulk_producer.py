"""The producer warp of caches whose pages are multiples of 64 rows: tiles by TMA, for one block or two at a time."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla.producer import announce
from tkq.attention.mla.spec import HEAD_DIM
from tkq.attention.mla.state import HALF
from tkq.attention.mla.tiles import own

LANES = 4  # words of 16 rows each that say which rows of a tile are there


class BulkProducer:
    """A tile is a panel of 64 columns at a time; with multicast each block of a cluster loads its rows for both. What
    lies ``ahead`` comes into L2 first: shared memory has no room for as many loads as the memory takes to answer.

    Rows behind the sequence's end come as they are: the warpgroups of values clear them. Pages that are not there come
    as zeros, from behind the cache's end."""

    def __init__(self, spec, config):
        self.walk, self.dtype, self.config = Walk(spec), tk.element_type(spec.dtype), config

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
                page, far = self.find(g, s, s.first), Int32(-1)
                if const_expr(self.config.ahead > 0):
                    far = self.find(g, s, s.first + self.config.ahead)
                for block in cutlass.range(s.first, s.end, unroll=1):
                    there = (page >= 0) & (page < g.k.shape[0])
                    fault = (page < -1) | (page >= g.k.shape[0])
                    rows = self.rows(s, block, there)
                    at_row = (block * ROWS) % g.page_size // ROWS
                    here = cutlass.select_(there, page, Int32(g.k.shape[0]))
                    page = self.find(g, s, block + 1)
                    if fault:
                        self.blame(g, smem, slot)
                    self.half(g, smem.left, (smem.left_pipe, left), (here, at_row, 0), (smem.there, rows))
                    smem.rope_pipe.acquire_empty(rope)
                    self.load(g, smem.rope, (smem.rope_pipe, rope), (here, at_row, 8), (rope.stage, 1))
                    if const_expr(self.config.ahead > 0):
                        far = self.near(g, smem, s, block + self.config.ahead, far)
                    self.half(g, smem.right, (smem.right_pipe, right), (here, at_row, 4), (smem.bad, rows))
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

    @cute.jit
    def near(self, g, smem, s, block, page):
        """A block's rows come into L2. The page of the next one."""
        if (block < s.end) & (page >= 0) & (page < g.k.shape[0]):
            row, box = (block * ROWS) % g.page_size // ROWS, smem.rope.scratch(tk.st(ROWS, 64, self.dtype))[0]
            for panel in cutlass.range_constexpr(HEAD_DIM // 64):
                tk.prefetch_tile(box, g.latent, (page, row, panel))
        return self.find(g, s, block + 1)

    def half(self, g, tile, at, place, told):
        """A half of a block of keys, a piece at a time. told: where the words of its rows go, and this lane's."""
        (pipe, ring), (page, row, column), (places, rows) = at, place, told
        panels = HALF // 64 // self.config.pieces
        for i in range(self.config.pieces):
            pipe.acquire_empty(ring)
            if i == 0:
                self.tell(places, ring.stage // self.config.pieces, rows)
            self.load(g, tile, at, (page, row, column + i * panels), (ring.stage * panels, panels))

    def load(self, g, tile, at, place, boxes):
        """Some boxes of 64 columns, the first of which is ``boxes[0]`` of the ring of tiles; a stage of the pipe."""
        (pipe, ring), (page, row, column), (first, panels) = at, place, boxes
        tk.expect_bytes(pipe.full[ring.stage], pipe.bytes)
        tiles = tile.scratch(tk.st(ROWS, 64, self.dtype))
        for panel in range(panels):
            tk.load_async(tiles[first + panel], g.latent, (page, row, column + panel), pipe.full[ring.stage])
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
