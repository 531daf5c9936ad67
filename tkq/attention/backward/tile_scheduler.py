"""Which task a block of attention's backward has: one of its own, or one after the other."""
from dataclasses import fields

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.math import limits
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import Task
from tkq.attention.common.query_mask import QueryExtent, blocks_that_add, mask_limits, query_tiles_of, tile_of_task
from tkq.attention.common.tile_order import blocks_before, l2_section_of, part_in_order, serial_block, serial_heads


class TileScheduler:
    """The numbers of tasks, in an order in which the heads of a section stay in L2, and what producer, dK/dV part, dQ
    part and helper warps ask about a task: one source for all of them.

    A task is a block of keys of one K/V head with all its query heads. With ``heads_per_task`` parts of these have
    tasks of their own, those of a K/V head as far apart as there are blocks at once: tasks of several query heads of a
    causal problem, which take unequally long, are soon at different ones, and more than L2 holds would be at work at
    once. With a serial or ordered dQ the blocks of a head come last to first; with an ordered one, where there are
    masks, those of the last heads first to last, so that the longest tasks do not come at the end. These go through
    their tiles from the last to the first: each then ends at its diagonal, as far behind the longer ones as it has
    begun behind them."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        self.spec, self.config = spec, config
        self.both_ways = config.ordered and config.longest_first and spec.right and not spec.varlen

    # ---- host ----------------------------------------------------------------------------------

    def split_heads(self, heads, kv_heads):
        """(K/V heads in number, as many as have tasks of their own; how many of them are of one K/V head, or None)."""
        heads_per_task = self.config.heads_per_task
        if not heads_per_task:
            return kv_heads, None
        of_task = cutlass.select_(heads // kv_heads % heads_per_task == 0, Int32(heads_per_task), Int32(1))
        return heads // of_task, heads // kv_heads // of_task

    def descending(self, heads, l2_section, tail_heads):
        """With an ordered dQ: of ``heads`` K/V heads, in order, those whose blocks come from the last to the first."""
        if not self.both_ways:
            return Int32((1 << 31) - 1)
        return serial_heads(heads, l2_section, tail_heads * self.config.tail_waves)

    # ---- device --------------------------------------------------------------------------------

    def extent(self, g, rows_q, rows_k):
        left, right = (g.left if self.spec.left else None), (g.right if self.spec.right else None)
        return QueryExtent(rows_q, rows_k, self.config.tile, self.config.block, left, right)

    def task(self, g, s) -> Task:
        """This block's: worked out where it is asked for, or, with sequences to be looked through, once."""
        if not self.spec.varlen:
            return self.find_task(g, Int32(cute.arch.block_idx()[0]))
        return task_from(s.task, 0)

    def first_key(self, t):
        return t.block * self.config.block

    @cute.jit
    def each_task(self, g, s, work: Constexpr):
        """``work(t, reload_task)`` for the block's task, or for one after the other, as the producer names them.
        reload_task(): t, read again from shared memory where it is there, which frees its registers meanwhile."""
        if const_expr(self.config.persistent):
            ring, more = s.tasks.ring(), Int32(1)
            while more > 0:
                tk.wait(s.tasks.full[ring.stage], ring.phase)
                t = task_from(s.tasks.slots, ring.stage)
                more = t.rows_k
                if more > 0:
                    work(t, lambda: task_from(s.tasks.slots, ring.stage))
                cute.arch.sync_warp()
                tk.arrive(s.tasks.empty[ring.stage])
                ring.advance()
        else:
            t = self.task(g, s)
            work(t, lambda: self.task(g, s) if self.spec.varlen else t)

    @cute.jit
    def post_task(self, g, to):
        """Each warp finds the same; one thread writes it down, in ``to``."""
        values = values_of(self.find_task(g, Int32(cute.arch.block_idx()[0])))
        if Int32(cute.arch.thread_idx()[0]) == 0:
            for i in cutlass.range_constexpr(len(values)):
                to[i, 0] = values[i]
        tk.sync_block()

    @cute.jit
    def find_task(self, g, i):
        """Task i."""
        c, masks = self.config, const_expr(self.spec.left or self.spec.right)

        def order(index, blocks, heads, rows_q):
            l2_section = g.l2_section
            if self.spec.varlen:
                l2_section = l2_section_of(rows_q, g.l2_section, c.l2_section_bytes, heads)
            sections = c.ordered or (masks and c.longest_first)
            head, block = tile_of_task(index, blocks, heads, l2_section, sections, self.tail_heads(g))
            head = self.head_in_order(g, head)
            if const_expr(c.serial):
                block = serial_block(block, blocks, head < g.dq_serial.heads)
            if const_expr(c.ordered):
                block = serial_block(block, blocks, head < g.descending)
            return head, block

        at = g.layout.at(True, c.block, i, g.kv_heads, order, c.longest_first)
        r = query_tiles_of(self.extent(g, at.rows_q, at.rows_k), at.number * c.block)
        first = g.layout.first_tile(at, c.tile, g.heads, g.tiles)
        return Task(at.sequence, at.rows_q, at.rows_k, at.batch_q, at.batch_k, first, at.head, at.number, r.first,
                    r.first_unmasked, r.end_unmasked, r.end)

    def tail_heads(self, g):
        """See ``tile_of_task``."""
        return g.tail_heads * self.config.tail_waves

    def head_in_order(self, g, head):
        """Head ``head`` in the order of work."""
        if not self.config.heads_per_task:
            return head
        return part_in_order(head, g.kv_heads * g.layout.batches, g.splits_per_kv_head, g.l2_section, g.tail_heads)

    def kv_head(self, g, t):
        """Of the task, in K and V."""
        return t.head // g.splits_per_kv_head if self.config.heads_per_task else t.head

    def query_head(self, g, t, h):
        return t.head * g.heads_per_kv + h

    def tile_number(self, g, t, head, m):
        """Of tile m of a query head, among those of all heads."""
        return Int64(t.first_tile) + Int64(head) * g.tiles + m

    def blocks_that_add(self, g, rows_q, rows_k, m):
        """To dQ of tile m of a sequence."""
        return blocks_that_add(self.extent(g, rows_q, rows_k), m)

    def blocks_before(self, g, t, m):
        """How many blocks add to dQ of tile m before the task's does, with an ordered dQ."""
        return blocks_before(t.block, self.blocks_that_add(g, t.rows_q, t.rows_k, m), self.is_descending(g, t))

    def is_descending(self, g, t):
        """Is the task of a head whose blocks come from the last to the first, each with its first tile first?"""
        return t.sequence * g.kv_heads + t.head < g.descending

    # ---- of a task -----------------------------------------------------------------------------

    @cute.jit
    def each_tile(self, g, t, work: Constexpr):
        """``work(i, h, m)`` for each tile m of each query head h, in the order in which all roles go through them; i is
        0 the first time, and counts with ``fuse_preprocess``."""
        if const_expr(self.both_ways):
            forward = self.is_descending(g, t)
            for h in cutlass.range(g.heads_per_kv, unroll=1):
                for i in cutlass.range(t.end - t.first, unroll=1):
                    work(h + i, h, cutlass.select_(forward, t.first + i, t.end - 1 - i))
        elif const_expr(self.config.fuse_preprocess):
            tiles = t.end - t.first
            for h in cutlass.range(g.heads_per_kv, unroll=1):
                for i in cutlass.range(tiles, unroll=1):
                    work(h * tiles + i, h, t.first + i)
        else:
            for h in cutlass.range(g.heads_per_kv, unroll=1):
                for m in cutlass.range(t.first, t.end, unroll=1):
                    work(h + m - t.first, h, m)

    @cute.jit
    def visit(self, g, s, t, c, step: Constexpr):
        """``step(g, s, t, c, m, masked)`` for each tile of each query head, in the order of ``each_tile``."""
        if const_expr(self.both_ways):
            self.visit_both_ways(g, s, t, c, step)
        else:
            self.visit_forward(g, s, t, c, step)

    @cute.jit
    def visit_both_ways(self, g, s, t, c, step: Constexpr):
        forward, masked = self.is_descending(g, t), t.first_unmasked - t.first
        for _ in cutlass.range(g.heads_per_kv, unroll=1):
            for i in cutlass.range(cutlass.select_(forward, masked, Int32(0)), unroll=1):
                step(g, s, t, c, t.first + i, True)
            for i in cutlass.range(t.end - t.first_unmasked, unroll=1):
                step(g, s, t, c, cutlass.select_(forward, t.first_unmasked + i, t.end - 1 - i), False)
            for i in cutlass.range(cutlass.select_(forward, Int32(0), masked), unroll=1):
                step(g, s, t, c, t.first_unmasked - 1 - i, True)

    @cute.jit
    def visit_forward(self, g, s, t, c, step: Constexpr):
        for _ in cutlass.range(g.heads_per_kv, unroll=1):
            for m in cutlass.range(t.first, t.first_unmasked, unroll=1):
                step(g, s, t, c, m, True)
            for m in cutlass.range(t.first_unmasked, t.end_unmasked, unroll=1):
                step(g, s, t, c, m, False)
            if const_expr(self.spec.left):
                for m in cutlass.range(t.end_unmasked, t.end, unroll=1):
                    step(g, s, t, c, m, True)

    def limits(self, g, t, m, half):
        """Of ``probabilities``: which queries of tile m see which of 64 keys."""
        key = t.block * self.config.block + half * 64
        return limits(*mask_limits(self.extent(g, t.rows_q, t.rows_k), key, m), rows=t.rows_k - key)

    def release_kv(self, s, which):
        """A warp reads K (0) or V (1) of its task no more."""
        if self.config.persistent:
            cute.arch.sync_warp()
            tk.arrive(s.kv_empty[which])

    def next_kv(self, kv):
        """To the next task's K and V."""
        if self.config.persistent:
            kv.advance()


def values_of(t: Task) -> list:
    return [Int32(getattr(t, field.name)) for field in fields(Task)]


def task_from(slots, i) -> Task:
    """As it was posted."""
    return Task(*[cute.arch.make_warp_uniform(slots[f, i]) for f in range(len(fields(Task)))])
