"""Which task a block of attention's backward has: one of its own, or one after the other."""
from dataclasses import fields

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward.state import Task
from tkq.attention.common.query_mask import QueryExtent, query_tiles_of, tile_of_task
from tkq.attention.common.tile_order import l2_section_of, serial_block


class BackwardTasks:
    """What ``BackwardBase`` knows of tasks: numbers, in an order in which the heads of a section stay in L2."""

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
    def assign_if(self, condition, roles: Constexpr):
        if condition:
            tk.assign(roles)
        else:  # where no block has a key: a kernel that waits for this one waits for BackwardPreprocess through it
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def find_task(self, g, i):
        """Task i."""
        c, masks = self.config, const_expr(self.spec.left or self.spec.right)

        def order(index, blocks, heads, rows_q):
            l2_section = g.l2_section
            if self.spec.varlen:
                l2_section = l2_section_of(rows_q, g.l2_section, c.l2_section_bytes, heads)
            head, block = tile_of_task(index, blocks, heads, l2_section, masks and c.longest_first, g.tail_heads)
            if const_expr(c.dq_serial):
                block = serial_block(block, blocks, head < g.dq_serial.heads)
            return head, block

        at = g.layout.at(True, c.block, i, g.kv_heads, order, c.longest_first)
        r = query_tiles_of(self.extent(g, at.rows_q, at.rows_k), at.number * c.block)
        first = g.layout.first_tile(at, c.tile, g.heads, g.tiles)
        return Task(at.sequence, at.rows_q, at.rows_k, at.batch_q, at.batch_k, first, at.head, at.number, r.first,
                    r.first_unmasked, r.end_unmasked, r.end)

    def kv_head(self, g, t):
        return t.head

    def query_head(self, g, t, h):
        return t.head * g.heads_per_kv + h

    def tile_number(self, g, t, head, m):
        """Of tile m of a query head, among those of all heads."""
        return Int64(t.first_tile) + Int64(head) * g.tiles + m


def values_of(t: Task) -> list:
    return [Int32(getattr(t, field.name)) for field in fields(Task)]


def task_from(slots, i) -> Task:
    """As it was posted."""
    return Task(*[cute.arch.make_warp_uniform(slots[f, i]) for f in range(len(fields(Task)))])
