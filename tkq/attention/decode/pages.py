"""Where the rows of a block of keys lie, and which of them are there: what producer warps ask, of any cache."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.decode import words


class Looked(NamedTuple):
    """The keys that a warp loads at a time. k, v: addresses of this lane's rows, 0: not there; page, row: where. there:
    one bit for each of the warp's rows. fault: does the table lie?"""

    k: Int64
    v: Int64
    page: Int32
    row: Int32
    there: Int32
    fault: cutlass.Boolean


class Pages:
    """A warp has a quarter of each tile's rows; a lane looks up one row's page. Rows behind the sequence's end, and
    those of pages that are not there, have the address 0."""

    def __init__(self, spec, config):
        self.spec, self.config = spec, config

    @cute.jit
    def find(self, g, s, block):
        """(page, row of the page, has the sequence such a key?) of this lane's row. The page is first looked at a block
        later: nothing waits for it here."""
        lane, key = tk.lane_id(), self.key(block)
        seen = (lane < self.config.rows_per_warp) & (key < s.length)
        page = s.source
        row = key
        if const_expr(self.spec.paged):
            page = key // g.page_size
            row = key - page * g.page_size
            if seen:
                page = g.table[s.source, page]
        return page, row, seen

    def start(self, g, first):
        """(page of the sequence, row of it) of this lane's row of a block, and how far the next block's is."""
        key = self.key(first)
        page, step = key // g.page_size, Int32(self.config.keys) // g.page_size
        return (page, key - page * g.page_size), (step, self.config.keys - step * g.page_size)

    @cute.jit
    def at(self, g, s, place, block):
        """As `find`, of a row whose place is known."""
        number, row = place
        there = (tk.lane_id() < self.config.rows_per_warp) & (self.key(block) < s.length)
        if there:
            number = g.table[s.source, number]
        return number, row, there

    def after(self, g, place, step):
        """The place in the next block, without a division."""
        row = place[1] + step[1]
        over = row >= g.page_size
        return (place[0] + step[0] + cutlass.select_(over, Int32(1), Int32(0)),
                row - cutlass.select_(over, g.page_size, Int32(0)))

    def judge(self, g, page, seen):
        """(is the row there?, does its table lie?)"""
        if not self.spec.paged:
            return seen, cutlass.Boolean(False)
        there = seen & (page >= 0) & (page < g.k.shape[0])
        bad = seen & ((page < -1) | (page >= g.k.shape[0]))
        return there, bad

    def key(self, block):
        return block * self.config.keys + tk.warp_id() % 4 * self.config.rows_per_warp + tk.lane_id()

    def address(self, cache, s, page, row, there):
        """Of the row's first element; 0: not there."""
        page_step, row_step, head_step, _ = cache.stride
        elements = Int64(page) * Int64(page_step) + Int64(row) * Int64(row_step) + Int64(s.head) * Int64(head_step)
        bytes = elements * (cache.element_type.width // 8)
        return cutlass.select_(there, cache.iterator.toint() + bytes, Int64(0))

    @cute.jit
    def tell(self, g, smem, stage, there, bad):
        """Which of the warp's rows are there, and whether a page of them cannot be."""
        fault, warp = cute.arch.vote_any_sync(bad), tk.warp_id() % 4
        rows, faults, plan = smem.there, smem.bad, g.plan
        if tk.lane_id() == 0:
            rows[warp, stage] = there
            faults[warp, stage] = Int32(fault)
            if fault:
                plan[words.BAD_PAGE] = Int32(1)
