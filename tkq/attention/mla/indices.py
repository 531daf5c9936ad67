"""Where the rows of a block of keys lie that a query has a list of, and which of them are there."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

import tkq.tile as tk
from tkq.attention.decode.pages import Pages
from tkq.attention.mla.tiles import place_of


class Indices:
    """What `decode.pages.Pages` is to tables of pages: a lane looks up one row's place in the cache, page * rows of a
    page + row of it. Rows that are not there have the address 0."""

    def __init__(self, spec, config):
        self.config, self.pages = config, Pages(spec, config)

    @cute.jit
    def find(self, g, s, block):
        """(index, 0, has the list such a key?) of this lane's row. The index is first looked at a block later."""
        key = self.pages.key(block)
        seen = (tk.lane_id() < self.config.rows_per_warp) & (key < s.length)
        index, (sequence, query) = Int32(-1), place_of(g, s)
        if seen:
            index = g.table[sequence, query, key]
        return index, Int32(0), seen

    def judge(self, g, index, seen):
        """(is the row there?, does the list lie?)"""
        place, rows = Int64(index), Int64(g.k.shape[0]) * g.page_size
        return seen & (index >= 0) & (place < rows), seen & ((index < -1) | (place >= rows))

    def address(self, cache, s, index, row, there):
        """Of the row's first element; 0: not there. row: of the list, which has none."""
        page_step, row_step, _, _ = cache.stride
        size = Int32(cache.shape[1])
        page = index // size
        elements = Int64(page) * Int64(page_step) + Int64(index - page * size) * Int64(row_step)
        return cutlass.select_(there, cache.iterator.toint() + elements * (cache.element_type.width // 8), Int64(0))

    def tell(self, g, smem, stage, there, bad):
        self.pages.tell(g, smem, stage, there, bad)
