"""Which chunks a block goes through, of a sequence that is cut where gates forget."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tkq.linear_attention.config import ALL
from tkq.runtime.compile import fake


class ChunkRange(NamedTuple):
    """The chunks [first, end) of a block. Outputs are stored from `stored_from` on: chunks before it warm up the state.
    """

    first: Any
    stored_from: Any
    end: Any


class OverlappingSegments:
    """Segments of a sequence that run at once, each from a state of zeros, warmed up by as many chunks in front of it
    as still matter to the state that it begins with: what came before them is less than rounding leaves.

    reach: (B, N - 1, HO) int32, of segments 1 to N - 1 of each sequence, how many chunks these are (see
    `split.reach.Reach` and `channels.bounded.reach.BoundedReach`). Where ALL do, a head that does not forget, the block
    of the segment before goes on through this one, and this one's block has nothing to do: the same chunks in the same
    order as of a whole sequence. No segment is without a chunk."""

    def __init__(self, there: bool):
        self.there = there

    # ---- host ----------------------------------------------------------------------------------

    def fake_reach(self, B, HO):
        """For the compiler; None without."""
        return fake.tensor("int32", (B, fake.sym(), HO), align=4) if self.there else None

    def blocks(self, sequences, reach):
        """Of a head and a part of V."""
        return sequences * (reach.shape[1] + 1) if self.there else sequences

    # ---- device --------------------------------------------------------------------------------

    def sequence(self, g, block):
        """(the sequence of a block, its segment or None)."""
        if not self.there:
            return block, None
        count = g.reach.shape[1] + 1
        return block // count, block % count

    def of_block(self, g, t, segment, whole) -> ChunkRange:
        """What a block goes through. whole: chunks of its sequence."""
        if not self.there:
            return ChunkRange(Int32(0), None, whole)
        return self.of_segment(g, t, segment, whole)

    @cute.jit
    def of_segment(self, g, t, segment, whole):
        rest = g.reach.shape[1]
        each, reach = cute.ceil_div(whole, rest + 1), g.reach[t.batch, None, t.head]
        before, last = Int32(0), segment  # the last segment that the block goes on to
        if segment > 0:
            before = reach[segment - 1]
        going = before < ALL
        while going:
            going = cutlass.Boolean(False)
            if last < rest:
                going = reach[last] == ALL
            if going:
                last += 1
        stored_from, end = segment * each, cutlass.min((last + 1) * each, whole)
        first = cutlass.select_(before < ALL, stored_from - before, end)
        return ChunkRange(*[cute.arch.make_warp_uniform(x) for x in (first, stored_from, end)])

    def stores(self, leader, span: ChunkRange, chunk):
        """Does this warp store a chunk's outputs?"""
        return leader & (chunk >= span.stored_from) if self.there else leader
