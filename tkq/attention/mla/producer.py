"""The four producer warps: they find the rows of the latent cache, and copy them into shared memory."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.decode.copies import address_from
from tkq.attention.decode.pages import Pages
from tkq.attention.decode.producer import Producer as Copies
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla.copies import GROUPS, copy_panels, row_of
from tkq.attention.mla.indices import Indices
from tkq.attention.mla.tiles import own


class Producer:
    """A warp has a quarter of each tile's rows; pages are looked up as in `decode.pages`, rows of a list as in
    `mla.indices`. The left half of a row comes first: the scores begin with it.

    Rows behind the sequence's end, and those of pages that are not there, are zeros: 0 * NaN of a value would be NaN.
    Which rows are there the scores read from ``smem.there``. The consumers walk through no plan: the first warp
    announces each segment to them."""

    def __init__(self, spec, config):
        self.pages = (Indices if spec.sparse else Pages)(spec, config)
        self.copies, self.walk = Copies(spec, config), Walk(spec)

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
                note(smem, slot, Int32(0))
                page, row, seen = self.pages.find(g, s, s.first)
                for block in cutlass.range(s.first, s.end, unroll=1):
                    there, fault = self.pages.judge(g, page, seen)
                    rows = self.rows(self.pages.address(g.k, s, page, row, there))
                    now = cute.arch.vote_ballot_sync(there)
                    page, row, seen = self.pages.find(g, s, block + 1)
                    smem.left_pipe.acquire_empty(left)
                    self.pages.tell(g, smem, left.stage, now, fault)
                    if cute.arch.vote_any_sync(fault):
                        note(smem, slot, Int32(1))
                    copy_panels(smem.left, left.stage, rows, (0, 4))
                    self.copies.done(smem.left_pipe, left)
                    smem.rope_pipe.acquire_empty(rope)
                    copy_panels(smem.rope, rope.stage, rows, (8, 9))
                    self.copies.done(smem.rope_pipe, rope)
                    smem.right_pipe.acquire_empty(right)
                    copy_panels(smem.right, right.stage, rows, (4, 8))
                    self.copies.done(smem.right_pipe, right)
            self.walk.advance(g, at, s)
        announce(smem, announced, (Int32(-1),))

    def rows(self, address):
        """Of the rows that this lane copies, from the lanes that looked them up."""
        return [address_from(address, row_of(i)) for i in range(GROUPS)]


@cute.jit
def note(smem, slot, value):
    """Is a page of this warp's rows of the segment not in the cache? Read at the segment's end: a warp is at most
    three blocks, and so three segments, ahead of it."""
    faults, warp = smem.faults, tk.warp_id() % 4
    if tk.lane_id() == 0:
        faults[warp, slot] = value


@cute.jit
def announce(smem, ring, fields):
    """What the consumers have to know of a segment."""
    if tk.warp_id() % 4 == 0:
        smem.segment_pipe.acquire_empty(ring)
        segments = smem.segments
        if tk.lane_id() == 0:
            for i in cutlass.range_constexpr(len(fields)):
                segments[i, ring.stage] = fields[i]
        smem.segment_pipe.commit(ring)
    ring.advance()
