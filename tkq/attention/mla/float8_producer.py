"""The four producer warps of float8 caches: rows of 656 bytes as they are into shared memory, and from there into tiles
of 16 bits."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.copies import address_from, copy16
from tkq.attention.decode.pages import Pages
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla.copies import GROUPS, PANEL, WARP_ROWS, row_of
from tkq.attention.mla.float8 import HALF_BYTES, ROTATED, SCALE_BYTES, SCALES, raw_chunk, widen_half
from tkq.attention.mla.indices import Indices
from tkq.attention.mla.producer import announce, note
from tkq.attention.mla.tiles import own


class Float8Producer:
    """As `mla.producer`, in two steps. A warp copies the halves of its rows, each with the scales, to memory of its
    own, a block ahead; it widens one half while the other, and then the next block's, is on its way. The rotated
    columns go straight into their tile. All three rings have two stages, and so one place."""

    def __init__(self, spec, config):
        self.pages = (Indices if spec.sparse else Pages)(spec, config)
        self.keys, self.walk = Pages(spec, config), Walk(spec)

    @cute.jit
    def run(self, g, smem):
        pair, announced = smem.left_pipe.ring(), smem.segment_pipe.ring()
        at = self.walk.begin(g)
        while at[X] < at[END]:
            s = own(g, self.walk.segment(g, at))._replace(head=Int32(0))
            if s.first < s.end:
                slot = announced.stage
                announce(smem, announced, (s.first, s.end, s.batch, s.tile, s.length, Int32(s.inside), s.splits,
                                           self.walk.slot(g, s, s.split)))
                note(smem, slot, Int32(0))
                page, _, _ = self.pages.find(g, s, s.first)
                address, there = self.find(g, smem, s, (page, s.first, slot))
                now = cute.arch.vote_ballot_sync(there)
                page, _, _ = self.pages.find(g, s, s.first + 1)
                self.fetch(smem, 0, address)
                self.fetch(smem, 1, address)
                for block in cutlass.range(s.first, s.end, unroll=1):
                    smem.rope_pipe.acquire_empty(pair)
                    self.rotated(smem, pair.stage, address)
                    cute.arch.cp_async_mbarrier_arrive_noinc(smem.rope_pipe.full[pair.stage].ptr)
                    smem.rope_pipe.commit(pair)
                    smem.left_pipe.acquire_empty(pair)
                    self.tell(smem, pair.stage, now)
                    address, there = self.find(g, smem, s, (page, block + 1, slot))
                    now = cute.arch.vote_ballot_sync(there)
                    page, _, _ = self.pages.find(g, s, block + 2)
                    self.widen(smem, 0, smem.left, smem.left_pipe, pair)
                    self.fetch(smem, 0, address)
                    smem.right_pipe.acquire_empty(pair)
                    self.widen(smem, 1, smem.right, smem.right_pipe, pair)
                    self.fetch(smem, 1, address)
                    pair.advance()
                cute.arch.cp_async_wait_group(0)
            self.walk.advance(g, at, s)
        announce(smem, announced, (Int32(-1),))

    @cute.jit
    def find(self, g, smem, s, of):
        """(address, is the row there?) of this lane's row. of: its page, the block, the segment's slot; all else is
        found anew, as there are no registers for it. Behind the segment's end there is nothing to copy; a table that
        lies there is one of the same task."""
        page, block, slot = of
        key = self.keys.key(block)
        seen = (tk.lane_id() < WARP_ROWS) & (key < s.length)
        there, fault = self.pages.judge(g, page, seen)
        plan = g.plan
        if cute.arch.vote_any_sync(fault):
            note(smem, slot, Int32(1))
            if tk.lane_id() == 0:
                plan[words.BAD_PAGE] = Int32(1)
        address = self.pages.address(g.k, s, page, key % g.page_size, there & (block < s.end))
        return address, there

    @cute.jit
    def tell(self, smem, stage, there):
        rows = smem.there
        if tk.lane_id() == 0:
            rows[tk.warp_id() % 4, stage] = there

    def rows(self, address):
        """(row of the warp's, its address) of each group of rows that this lane copies, from the lanes that looked them
        up."""
        for group in range(GROUPS):
            yield row_of(group), address_from(address, row_of(group))

    @cute.jit
    def fetch(self, smem, half: cutlass.Constexpr[int], address):
        """A half of the warp's rows, with all scales, as they are; one group of copies."""
        chunk, warp = tk.lane_id() % 8, tk.warp_id() % 4
        base = smem.raw.iterator.toint() + (half * 4 + warp) * (WARP_ROWS * HALF_BYTES)
        for row, at in self.rows(address):
            size = cutlass.select_(at != Int64(0), Int32(16), Int32(0))
            for part in range(2):
                copy16(Int32(base) + raw_chunk(row, chunk) + 128 * part,
                       at + Int64(chunk * 16) + (half * HALF_BYTES + part * 128), size)
        if tk.lane_id() < WARP_ROWS:
            to = smem.scales.iterator.toint() + (half * 4 + warp) * (WARP_ROWS * SCALE_BYTES)
            copy16(Int32(to) + tk.lane_id() * SCALE_BYTES, address + SCALES,
                   cutlass.select_(address != Int64(0), Int32(16), Int32(0)))
        cute.arch.cp_async_commit_group()

    def rotated(self, smem, stage, address):
        """64 columns of 16 bits: eight lanes to a row."""
        chunk, warp, tile = tk.lane_id() % 8, tk.warp_id() % 4, smem.rope
        base = Int32(tile.staged.iterator.toint()) + stage * tile.type.bytes + warp * (WARP_ROWS * PANEL)
        for row, at in self.rows(address):
            copy16(base + row * PANEL + (chunk ^ (row % 8)) * 16, at + Int64(chunk * 16) + ROTATED,
                   cutlass.select_(at != Int64(0), Int32(16), Int32(0)))

    @cute.jit
    def widen(self, smem, half: cutlass.Constexpr[int], tile, pipe, ring):
        """The half has landed: all but the youngest group of copies, which is the other half's."""
        cute.arch.cp_async_wait_group(1)
        cute.arch.sync_warp()
        widen_half(smem, half, tile, ring.stage)
        tk.publish()
        cute.arch.sync_warp()
        pipe.commit(ring)
