"""What chunked prefill was asked for beside the forward's own spec: the compile keys."""
from __future__ import annotations

from dataclasses import dataclass

BOXES = tuple(range(8, 129, 8))  # rows


@dataclass(frozen=True)
class CacheSpec:
    """paged: keys and values lie in pages that a table names; else each sequence has its own rows. ragged: sequences
    have different numbers of queries. box: rows that one copy brings, all of one page; they divide a tile's keys.
    row_groups: with all columns, in groups of 8 rows: pages are a multiple of 8 rows apart. Else 64 columns."""

    paged: bool = True
    ragged: bool = False
    box: int = 128
    row_groups: bool = False

    def __post_init__(self):
        if self.box not in BOXES:
            raise NotImplementedError(f"CacheSpec: box is {self.box}, allowed are multiples of 8 from 8 to 128")
