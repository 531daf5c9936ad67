"""Which query tiles a key block is seen by, which of them need a mask, and in which order blocks come: pure arithmetic.

The counterpart of ``ranges`` for the backward pass, where a block of keys stays and the queries pass by. The kernels
call these functions on run-time ints, the tests on Python's ints; ranges are computed here only.

Query i is aligned with key i + rows_k - rows_q, so that the last query meets the last key, and sees the keys from
``left`` before it to ``right`` behind it, inclusive. None: no limit on that side. Causal is right = 0.
"""
from dataclasses import dataclass
from typing import Any, Optional

from tkq.attention.common.integers import _chosen, ceil_div, least, most
from tkq.attention.common.tile_order import serial_heads


@dataclass(frozen=True)
class QueryExtent:
    """The sizes that ranges depend on. tile: query rows of a Q tile. block: keys of a task."""

    rows_q: Any
    rows_k: Any
    tile: int
    block: int
    left: Optional[Any] = None
    right: Optional[Any] = None

    @property
    def offset(self):
        """Key j is aligned with query j + offset."""
        return self.rows_q - self.rows_k

    @property
    def mirrored(self):
        """Queries as keys and keys as queries."""
        return QueryExtent(self.rows_k, self.rows_q, self.block, self.tile, self.right, self.left)


@dataclass(frozen=True)
class TileRange:
    """Tiles, or blocks, ``first .. end``, perhaps none: those before ``first_unmasked`` with a mask, ``first_unmasked
    .. end_unmasked`` without, those from there on with a mask again."""

    first: Any
    first_unmasked: Any
    end_unmasked: Any
    end: Any


def query_tiles_of(e: QueryExtent, first_key) -> TileRange:
    """The query tiles that see any of the keys ``first_key .. first_key + e.block``. The first masks are for the limit
    on the right, the last ones for that on the left; a block that ends beyond the last key has no tile without."""
    seen = _seeing(e, first_key)
    ragged = first_key + e.block > e.rows_k
    return TileRange(seen.first, _chosen(ragged, seen.end, seen.first_unmasked),
                     _chosen(ragged, seen.end, seen.end_unmasked), seen.end)


def key_blocks_of(e: QueryExtent, first_row) -> TileRange:
    """The key blocks that any of the rows ``first_row .. first_row + e.tile`` sees. The first masks are for the limit
    on the left, the last ones for that on the right and for the end of the keys."""
    seen = _seeing(e.mirrored, first_row)
    end_unmasked = most(least(seen.end_unmasked, e.rows_k // e.block), seen.first)
    return TileRange(seen.first, least(seen.first_unmasked, end_unmasked), end_unmasked, seen.end)


def blocks_that_add(e: QueryExtent, tile):
    """How many key blocks, the first ones, query tile ``tile`` sees, without a limit on the left; 0 behind the rows."""
    seen = key_blocks_of(e, tile * e.tile).end
    return _chosen(tile * e.tile < e.rows_q, seen, seen * 0)


def _seeing(e: QueryExtent, first_key) -> TileRange:
    """``query_tiles_of``, without regard to keys past the end."""
    tiles, last_key = ceil_div(e.rows_q, e.tile), least(first_key + e.block, e.rows_k)
    first = first_unmasked = first_key * 0  # as a run-time int where first_key is one
    end = end_unmasked = tiles + 0
    if e.right is not None:
        nearest = first_key + e.offset - e.right  # the first query that sees the block's first key
        first = most(nearest, 0) // e.tile
        first_unmasked = ceil_div(most(last_key - 1 + e.offset - e.right, 0), e.tile)
    if e.left is not None:
        beyond = most(last_key + e.offset + e.left, 0)  # the first query that no longer sees the block's last key
        end = least(ceil_div(beyond, e.tile), tiles)
        seeing_all = most(first_key + e.offset + e.left + 1, 0)
        end_unmasked = _chosen(seeing_all >= e.rows_q, end, seeing_all // e.tile)
    first = least(first, end)
    first_unmasked = least(most(first_unmasked, first), end)
    return TileRange(first, first_unmasked, least(most(end_unmasked, first_unmasked), end), end)


def mask_limits(e: QueryExtent, first_key, tile):
    """(first, end) for scores of the keys from ``first_key`` on and the queries of a tile: row i sees the columns
    ``first + i <= column < end + i``. None: no limit on that side. Rows past the last key are treated as any other."""
    row = first_key + e.offset - tile * e.tile
    return (None if e.right is None else row - e.right), (None if e.left is None else row + e.left + 1)


def tile_of_task(index, blocks, heads, l2_section, longest_first, tail_heads=0):
    """Task ``index`` as (K/V head of all batches, key block).

    longest_first: the heads of a section of ``l2_section``, whose queries and gradients stay in L2 together, side by
    side: their first blocks, which a causal problem's most queries see, before the others. The last ``tail_heads``
    heads, and what
    no section is left for, are one section: with a head alone at the end, its first block would end long after all
    others. Otherwise head by head."""
    if not longest_first:
        return index // blocks, index % blocks
    sections = serial_heads(heads, l2_section, tail_heads) // l2_section  # before the last one
    number = least(index // (l2_section * blocks), sections)
    within = index - number * (l2_section * blocks)
    width = _chosen(number < sections, l2_section, heads - sections * l2_section)
    return number * l2_section + within % width, within // width
