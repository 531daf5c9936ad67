"""The four producer warps: they find the rows of the latent cache, and copy them into shared memory."""
import cutlass
import cutlass.cute as cute
from cutlass import Int64

from tkq.attention.decode.producer import Producer as Pages
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla_two.copies import GROUPS, copy_panels, row_of
from tkq.attention.mla_two.tiles import own


class Producer:
    """A warp has a quarter of each tile's rows; pages are looked up as in `decode.producer`. The left half of a row
    comes first: it is free first, and the scores begin with it.

    Rows behind the sequence's end, and those of pages that are not there, are zeros: 0 * NaN of a value would be NaN.
    Which rows are there the scores read from ``smem.there``."""

    def __init__(self, spec, config):
        self.config, self.pages, self.walk = config, Pages(spec, config), Walk(spec)

    @cute.jit
    def run(self, g, smem):
        left, right = smem.left_pipe.ring(), smem.right_pipe.ring()
        at = self.walk.begin(g)
        while at[X] < at[END]:
            s = own(g, self.walk.segment(g, at))
            if s.first < s.end:
                page, row, seen = self.pages.find(g, s, s.first)
                for block in cutlass.range(s.first, s.end, unroll=1):
                    there, fault = self.pages.judge(g, page, seen)
                    rows = self.rows(self.pages.address(g.k, s, page, row, there))
                    now = cute.arch.vote_ballot_sync(there)
                    page, row, seen = self.pages.find(g, s, block + 1)
                    smem.left_pipe.acquire_empty(left)
                    self.pages.tell(g, smem, left.stage, now, fault)
                    copy_panels(smem.k.left, left.stage, rows, 0, 4)
                    self.pages.done(smem.left_pipe, left)
                    smem.right_pipe.acquire_empty(right)
                    copy_panels(smem.k.rope, right.stage, rows, 8, 1)
                    copy_panels(smem.k.right, right.stage, rows, 4, 4)
                    self.pages.done(smem.right_pipe, right)
            self.walk.advance(g, at, s)

    def rows(self, address):
        """Of the rows that this lane copies, from the lanes that looked them up."""
        mask = Int64(0xFFFFFFFF)
        low, high = cutlass.Int32(address & mask), cutlass.Int32(address >> Int64(32))
        return [(Int64(cute.arch.shuffle_sync(high, row_of(i))) << Int64(32))
                | (Int64(cute.arch.shuffle_sync(low, row_of(i))) & mask) for i in range(GROUPS)]
