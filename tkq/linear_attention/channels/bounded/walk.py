"""Which chunks a block goes through, where a sequence is cut in segments."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tkq.linear_attention.channels.parts import chunks
from tkq.linear_attention.channels.spec import ChannelSpec
from tkq.linear_attention.config import ALL


class Walk(NamedTuple):
    """The chunks [first, end) of a block. Outputs are stored from the chunk `kept` on: those before make the state."""

    first: Any
    kept: Any
    end: Any


class Walks:
    """With reach, (B, N - 1, HO), of N segments of each sequence, as `reach.BoundedReach` makes it: the block of
    segment n begins with nothing, as many chunks in front of it as reach the state that the segment begins with. What
    these leave of a state before them is less than rounding leaves. Where ALL do, the block of the segment before goes
    on to this one, and this one's has nothing to do: the same chunks in the same order as of a whole sequence."""

    def __init__(self, spec: ChannelSpec):
        self.spec, self.there = spec, spec.reach

    # ---- host ----------------------------------------------------------------------------------

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

    def of_block(self, g, t, segment) -> Walk:
        """What a block goes through."""
        if not self.there:
            return Walk(Int32(0), None, chunks(self.spec, g, t))
        return self.of_segment(g, t, segment)

    @cute.jit
    def of_segment(self, g, t, segment):
        whole, rest = chunks(self.spec, g, t), g.reach.shape[1]
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
