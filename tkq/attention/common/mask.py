"""Which tasks there are, in which order, and which key blocks a task sees: pure arithmetic.

The kernel calls these functions on run-time ints, the tests on Python's ints; ranges are computed here only. A *task*
is one tile of query rows of one head of one batch element: the work of a block, or of a cluster.
"""
from dataclasses import dataclass
from typing import Any, Optional

from tkq.attention.common.integers import ceil_div, least, most


@dataclass(frozen=True)
class Extent:
    """The sizes that ranges depend on. tile_rows: queries of a task. block: keys of a K or V tile.

    left, right: how many keys a query sees before and behind its own, which for query i is key i + rows_k - rows_q: the
    last query is aligned with the last key. None: no limit on that side. Causal is right = 0."""

    rows_q: Any
    rows_k: Any
    tile_rows: int
    block: int
    left: Optional[Any] = None
    right: Optional[Any] = None


@dataclass(frozen=True)
class KeyBlockRange:
    """A task's key blocks: ``first`` and the ``blocks`` - 1 behind it, visited from the last to the first. The first
    ``n_masked_right`` of the visit (1 or more) need a mask on both sides, the last ``n_masked_left`` on the left, those
    between none. At least one block, also for rows that see no key."""

    first: Any
    blocks: Any
    n_masked_right: Any
    n_masked_left: Any


def key_blocks_of(e: Extent, first_row) -> KeyBlockRange:
    """The blocks that the rows ``first_row .. first_row + tile_rows`` see.

    rows_k is 1 or more: a sequence without keys is visited as if it had one, and the mask, which knows better, hides
    it.
    """
    own = first_row + e.rows_k - e.rows_q  # the first row's own key
    end = ceil_div(e.rows_k, e.block)
    n_masked_right = 1  # the last block may be ragged
    if e.right is not None:
        end = most(least(end, ceil_div(own + e.right + e.tile_rows, e.block)), 1)
        whole = most(least(own + e.right + 1, e.rows_k), 0) // e.block  # blocks that every row sees up to their end
        n_masked_right = most(end - whole, 1)
    if e.left is None:
        return KeyBlockRange(0, end, n_masked_right, 0)
    first = least(most(own - e.left, 0) // e.block, end - 1)
    whole = ceil_div(most(own - e.left + e.tile_rows - 1, 0), e.block)  # from here on every row sees the beginning
    blocks = end - first
    n_masked_right = least(n_masked_right, blocks)
    return KeyBlockRange(first, blocks, n_masked_right, most(least(whole - first, blocks - n_masked_right), 0))


def keys_of_row(e: Extent, row):
    """The keys that row ``row`` sees, as (first, end); none where first is not below end. What the masks say."""
    own = row + e.rows_k - e.rows_q
    first = 0 if e.left is None else most(own - e.left, 0)
    return first, e.rows_k if e.right is None else most(least(own + e.right + 1, e.rows_k), 0)


def limits_in_block(e: Extent, row, block):
    """(first, end, most): of key block ``block`` row ``row`` sees the columns from ``first`` to ``end``, exclusive, and
    none from ``most`` on. first and end are one more for each row further; None where there is no limit."""
    start = block * e.block
    own = row + e.rows_k - e.rows_q
    first = None if e.left is None else own - e.left - start
    return first, None if e.right is None else own + e.right + 1 - start, e.rows_k - start
