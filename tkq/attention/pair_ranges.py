"""The way of two blocks through the key tiles of 256 rows that have a limit on both sides: pure arithmetic, as in
``ranges``."""
from typing import Any, NamedTuple

from tkq.attention.ranges import KeyRange


class Way(NamedTuple):
    """A block's key tiles: ``top``, top - 1, .. of ``slots`` slots. alone: the slot whose tile only this block sees,
    the first or the last one. there: 1, or 0 where that block sees no such tile, and the slot is empty."""

    top: Any
    slots: Any
    alone: Any
    there: Any


def way_of(upper: KeyRange, lower: KeyRange, rank) -> Way:
    """Of the block with the first 128 rows (rank 0), which see ``upper``, or of the other one, whose 128 rows see
    ``lower``. Neither end of the two ranges is more than a tile apart: see ``PairForward``."""
    end = upper.first + upper.blocks
    above = lower.first + lower.blocks - end
    below = lower.first - upper.first
    slots = end - lower.first + 1
    return Way(end - 1 + rank, slots, (1 - rank) * (slots - 1), below + rank * (above - below))


def let_pass(way: Way, seen: KeyRange) -> tuple:
    """(before, after): how many of the way's slots come before the tiles that the block's rows see, and after."""
    return way.top - (seen.first + seen.blocks - 1), seen.first - (way.top - way.slots + 1)
