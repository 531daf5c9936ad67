"""Which tasks there are, in which order, and which key blocks a task sees: pure arithmetic.

The kernel calls these functions on run-time ints, the tests on Python's; nobody else computes a range. A *task* is one
tile of query rows of one head of one batch element: the work of a block, or of a cluster.
"""
from dataclasses import dataclass
from typing import Any


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
    """The sizes that ranges depend on. tile_rows: query rows of a task. block: keys of a K or V tile."""

    rows_q: Any
    rows_k: Any
    tile_rows: int
    block: int
    causal: bool


@dataclass(frozen=True)
class KeyRange:
    """A task's key blocks: ``blocks`` of them, visited from the last to the first, the first ``masked`` of the visit
    with a mask, the others without. At least one block, also for rows that see no key."""

    blocks: Any
    masked: Any


def key_range(e: Extent, first_row) -> KeyRange:
    """The blocks that the rows ``first_row .. first_row + tile_rows`` see."""
    blocks = ceil_div(e.rows_k, e.block)
    if not e.causal:
        return KeyRange(blocks, 1)  # the last block may be ragged
    diagonal = first_row + e.rows_k - e.rows_q  # the last key that the first row sees
    blocks = most(least(blocks, ceil_div(diagonal + e.tile_rows, e.block)), 1)
    whole = most(diagonal + 1, 0) // e.block  # blocks that every row sees all of
    return KeyRange(blocks, most(blocks - whole, 1))


def keys_of_row(e: Extent, row):
    """How many keys row ``row`` sees: keys 0 .. n - 1. What the mask says, and what the tests count."""
    if not e.causal:
        return e.rows_k
    return most(least(row + e.rows_k - e.rows_q + 1, e.rows_k), 0)


def place(index, tiles, heads, section, causal):
    """Task ``index`` as (head of all batches, tile).

    Heads are worked on in sections of ``section``, whose K and V fit in L2 together. Inside a section of a causal
    problem the last tiles, which see the most keys, come first: dealt out dynamically, the blocks end together."""
    if not causal:
        return index // tiles, index % tiles
    tasks = section * tiles
    number, within = index // tasks, index % tasks
    width = least(section, heads - number * section)  # the last section may be narrow
    return number * section + within % width, tiles - 1 - within // width


def heads_in_section(kv_bytes, section_bytes, heads_per_kv, heads):
    """How many query heads share a section: as many as the K/V heads, of ``kv_bytes`` each, that fit. Not more than
    there are (``heads``): a section's tasks, counted in 32 bits, are then no more than all tasks."""
    return least(most(section_bytes // kv_bytes, 1), heads // heads_per_kv) * heads_per_kv
