"""Which chunks a block goes through, of a sequence that is cut where gates forget."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tkq.linear_attention.config import ALL
from tkq.runtime.compile import fake


class Walk(NamedTuple):
    """The chunks [first, end) of a block. Outputs are stored from the chunk `kept` on: those before make the state."""

    first: Any
    kept: Any
    end: Any


class Walks:
    """With reach, (B, N - 1, HO), of N segments of each sequence, how many chunks in front of the second and those
    behind it reach them (see `split.reach.Reach` and `channels.bounded.reach.BoundedReach`): the block of segment n
    begins with nothing, as many chunks in front of it as reach the state that the segment begins with. What these leave
    of a state before them is less than rounding leaves. Where ALL do, the block of the segment before goes
    on to this one, and this one's has nothing to do: the same chunks in the same order as of a whole sequence. No
    segment is without a chunk."""

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

    def of_block(self, g, t, segment, whole) -> Walk:
        """What a block goes through. whole: chunks of its sequence."""
        if not self.there:
            return Walk(Int32(0), None, whole)
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
        kept, end = segment * each, cutlass.min((last + 1) * each, whole)
        first = cutlass.select_(before < ALL, kept - before, end)
        return Walk(*[cute.arch.make_warp_uniform(x) for x in (first, kept, end)])

    def keeps(self, leader, walk: Walk, chunk):
        """Does this warp store a chunk's outputs?"""
        return leader & (chunk >= walk.kept) if self.there else leader
