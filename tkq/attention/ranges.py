"""Which tasks there are, in which order, and which key blocks a task sees: pure arithmetic.

The kernel calls these functions on run-time ints, the tests on Python's; nobody else computes a range. A *task* is one
tile of query rows of one head of one batch element: the work of a block, or of a cluster.
"""
import struct
from dataclasses import dataclass
from typing import Any, Optional


def least(a, b):
    """min, of Python ints or of run-time ints."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else _dsl().min(a, b)


def most(a, b):
    """max, likewise."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else _dsl().max(a, b)


def _dsl():
    import cutlass  # only a traced call needs it, and then it is there

    return cutlass


def ceil_div(a, b):
    return (a + b - 1) // b


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
class KeyRange:
    """A task's key blocks: ``first`` and the ``blocks`` - 1 behind it, visited from the last to the first. The first
    ``masked`` of the visit (1 or more) need a mask on both sides, the last ``masked_left`` on the left, those between
    none. At least one block, also for rows that see no key."""

    first: Any
    blocks: Any
    masked: Any
    masked_left: Any


def key_range(e: Extent, first_row) -> KeyRange:
    """The blocks that the rows ``first_row .. first_row + tile_rows`` see.

    rows_k is 1 or more: a sequence without keys is visited as if it had one, and the mask, which knows better, hides
    it.
    """
    own = first_row + e.rows_k - e.rows_q  # the first row's own key
    end = ceil_div(e.rows_k, e.block)
    masked = 1  # the last block may be ragged
    if e.right is not None:
        end = most(least(end, ceil_div(own + e.right + e.tile_rows, e.block)), 1)
        whole = most(least(own + e.right + 1, e.rows_k), 0) // e.block  # blocks that every row sees up to their end
        masked = most(end - whole, 1)
    if e.left is None:
        return KeyRange(0, end, masked, 0)
    first = least(most(own - e.left, 0) // e.block, end - 1)
    whole = ceil_div(most(own - e.left + e.tile_rows - 1, 0), e.block)  # from here on every row sees the beginning
    blocks = end - first
    masked = least(masked, blocks)
    return KeyRange(first, blocks, masked, most(least(whole - first, blocks - masked), 0))


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


def place(index, tiles, heads, section, longest_first):
    """Task ``index`` as (head of all batches, tile).

    longest_first: heads are worked on in sections of ``section``, whose K and V fit in L2 together, and inside a
    section the last tiles, which of a causal problem see the most keys, come first: dealt out dynamically, the blocks
    end together. Otherwise head by head."""
    if not longest_first:
        return index // tiles, index % tiles
    tasks = section * tiles
    number, within = index // tasks, index % tasks
    width = least(section, heads - number * section)  # the last section may be narrow
    return number * section + within % width, tiles - 1 - within // width


def heads_in_section(kv_bytes, section_bytes, heads_per_kv, heads):
    """How many query heads share a section: as many as the K/V heads, of ``kv_bytes`` each, that fit. Not more than
    there are (``heads``): a section's tasks, counted in 32 bits, are then no more than all tasks."""
    return least(most(section_bytes // kv_bytes, 1), heads // heads_per_kv) * heads_per_kv


def even_section(section, heads_per_kv, heads):
    """``section``, or fewer where that leaves the last section of ``heads`` less narrow: with few tasks in it there is
    nothing to fill up the wait for its longest with."""
    kv_heads, at_most = heads // heads_per_kv, most(section // heads_per_kv, 1)
    return ceil_div(kv_heads, most(ceil_div(kv_heads, at_most), 1)) * heads_per_kv


def work_rank(blocks):
    """0 to 30, the fewer the more work: sequences whose longest tasks have so many key blocks, in steps of half a power
    of 2. Those of a lower rank come first."""
    bits = _float_bits(most(blocks, 1))  # the exponent and the first bit behind it
    return most(30 - ((bits >> 22) - 254), 0)


def _float_bits(n):
    if isinstance(n, int):
        return struct.unpack("i", struct.pack("f", n))[0]
    return _dsl().Float32(n).bitcast(_dsl().Int32)
