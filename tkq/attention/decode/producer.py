"""The four producer warps: they find the rows of K and V, and copy them into shared memory."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

import tkq.tile as tk
from tkq.attention.decode.copies import address_from, copy16
from tkq.attention.decode.pages import Pages
from tkq.attention.decode.plan import padded
from tkq.attention.decode.walk import Walk

WARP, VECTOR = 32, 8  # lanes; elements of 16 bytes
PANEL = 128  # bytes of a row in a panel of a tile


class Producer:
    """A warp has a quarter of each tile's rows; a lane looks up one row's page, and its address reaches the lanes that
    copy the row by shuffles. The next block's pages are looked up before this block is copied.

    Rows behind the sequence's end, and those of pages that are not there, are zeros: 0 * NaN of V would be NaN. Which
    rows of K are there the consumers read from ``smem.there``, whose words are written before the tile is announced."""

    def __init__(self, spec, config):
        self.spec, self.config, self.walk, self.pages = spec, config, Walk(spec), Pages(spec, config)

    @cute.jit
    def run(self, g, smem):
        k_ring, v_ring = smem.k_pipe.ring(), smem.v_pipe.ring()
        self.walk.each_segment(g, lambda s: self.segment(g, smem, (k_ring, v_ring), s))

    @cute.jit
    def segment(self, g, smem, rings, s):
        k_ring, v_ring = rings
        page, row, seen = self.pages.find(g, s, s.first)
        for block in cutlass.range(s.first, s.end, unroll=1):
            there, fault = self.pages.judge(g, page, seen)
            k, v = self.pages.address(g.k, s, page, row, there), self.pages.address(g.v, s, page, row, there)
            now = cute.arch.vote_ballot_sync(there)
            page, row, seen = self.pages.find(g, s, block + 1)
            self.load_k(g, smem, k_ring, k, (now, fault))
            self.load_v(smem, v_ring, v)

    def load_k(self, g, smem, ring, address, found):
        smem.k_pipe.acquire_empty(ring)
        self.pages.tell(g, smem, ring.stage, *found)
        self.tile(smem.k, ring.stage, address, self.spec.head_dim)
        self.done(smem.k_pipe, ring)

    def load_v(self, smem, ring, address):
        smem.v_pipe.acquire_empty(ring)
        self.tile(smem.v, ring.stage, address, self.spec.head_dim_v)
        self.done(smem.v_pipe, ring)

    def tile(self, tile, stage, address, columns):
        """The warp's rows of a tile, swizzled as TMA would write them."""
        cfg, lane, warp = self.config, tk.lane_id(), tk.warp_id() % 4
        chunks, rows = padded(columns) // VECTOR, cfg.rows_per_warp
        base = Int32(tile.staged.iterator.toint()) + stage * (cfg.keys * chunks * 16) + warp * (rows * PANEL)
        for i in range(rows * chunks // WARP):
            index = i * WARP + lane
            row, chunk = index // chunks, index % chunks
            there = address_from(address, row)
            panel, part = chunk // 8, chunk % 8
            to = base + panel * (cfg.keys * PANEL) + row * PANEL + (part ^ (row % 8)) * 16
            some = there != Int64(0)
            if columns % 64:
                some = some & (chunk < columns // VECTOR)
            copy16(to, there + Int64(chunk) * 16, cutlass.select_(some, Int32(16), Int32(0)))

    def done(self, pipe, ring):
        """The tile is full when the copies have landed and each warp has said which rows are there."""
        cute.arch.cp_async_mbarrier_arrive_noinc(pipe.full[ring.stage].ptr)
        pipe.commit(ring)
        ring.advance()
