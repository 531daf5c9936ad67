"""Attention's backward for query heads that share a K/V head.

A task has several query heads, and blocks of keys of a causal problem, which take unequally long, are soon at different
ones: more than L2 holds is at work at once. So parts of the query heads have tasks of their own, as in
``gqa_split``, those of a K/V head as far apart as there are blocks at once. In the background zeroes, additions
and what is finished are counted by query head, not by K/V head: dQ of the first is finished while the next ones are
added up. The dQ warps that have no task left help to finish."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.dkv import AttentionBackward
from tkq.attention.backward.dkv import build as build_alike
from tkq.attention.backward.gqa_config import GroupedConfig, part_of_turn
from tkq.attention.backward.gqa_split import hand_on
from tkq.attention.backward.helper_warps import GroupedBackground
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import Task
from tkq.attention.common.query_mask import place, query_range


class GroupedBackward(AttentionBackward):
    """See ``AttentionBackward``; of equal sequences."""

    def __init__(self, spec: BackwardSpec, config: GroupedConfig):
        if spec.varlen or spec.left:
            raise NotImplementedError("attention backward: background by query heads, of packed sequences or with a "
                                      "limit on the left")
        super().__init__(spec, config)
        self.background = GroupedBackground(spec, config, self.turn)

    # ---- host ----------------------------------------------------------------------------------

    def parts_of_heads(self, heads, kv_heads):
        split = self.config.split
        if not split:
            return super().parts_of_heads(heads, kv_heads)
        of_task = cutlass.select_(heads // kv_heads % split == 0, Int32(split), Int32(1))
        return heads // of_task, heads // kv_heads // of_task

    def parts_of(self, workspace, tiles, heads, blocks=None):
        """With counters for as many query heads as there are tiles, or fewer, and one more."""
        return super().parts_of(workspace, tiles, tiles + 1, blocks)

    def in_background(self, dq, counters, lead, processors):
        return super().in_background(dq, counters, lead * self.config.rounds, processors)

    # ---- device --------------------------------------------------------------------------------

    @cute.jit
    def write_both(self, g, t, c, number):
        if const_expr(self.config.split):
            if self.hand_on(g, t, c, number):
                AttentionBackward.write_both(self, g, t, c, number)
        else:
            AttentionBackward.write_both(self, g, t, c, number)

    def hand_on(self, g, t, c, number):
        """From one part of the query heads to the next. Is this the last, which has the sums?"""
        blocks = g.tasks // (g.places.batches * g.kv_heads)
        place = (t.sequence * (g.kv_heads // g.share) + self.kv_head(g, t)) * (2 * blocks) + number
        return hand_on(g.handed, place, t.head % g.share, g.share, (c.dk, c.dv))

    def kv_head(self, g, t):
        return t.head // g.share if self.config.split else t.head

    @cute.jit
    def find_task(self, g, i):
        """Task i."""
        c = self.config

        def order(index, blocks, heads, rows_q):
            head, block = place(index, blocks, heads, g.section, const_expr(self.spec.right and c.longest_first),
                                g.tail * c.rounds)
            return self.turn(g, head), block

        at = g.places.at(True, c.block, i, g.kv_heads, order)
        r = query_range(self.extent(g, at.rows_q, at.rows_k), at.number * c.block)
        first = g.places.first_tile(at, c.tile, g.heads, g.tiles)
        return Task(at.sequence, at.rows_q, at.rows_k, at.batch_q, at.batch_k, first, at.head, at.number, r.first,
                    r.whole, r.whole_end, r.end)

    def turn(self, g, head):
        """The head whose turn it is when head ``head`` in order is worked on."""
        if not self.config.split:
            return head
        return part_of_turn(head, g.kv_heads * g.places.batches, g.share, g.section, g.tail)

    @cute.jit
    def queries(self, g, s):
        dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1)
        cute.arch.griddepcontrol_wait()  # the counters are zero
        self.each_task(g, s, lambda t, again: self.add_by_heads(g, s, t, again, dq, ring, kv))
        self.background.run(g)

    @cute.jit
    def add_by_heads(self, g, s, t, again: Constexpr, dq, ring, kv):
        rows, cols = self.config.dq_parts(self.spec.width)
        tk.wait(s.kv_full[0], kv.phase)
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            head = self.query_head(g, t, h)
            self.background.await_head(g, t, head)
            for m in cutlass.range(t.first, t.end, unroll=1):
                self.add_tile(g, s, t, dq, ring, head, m)
                if (h > 0) & (m == t.first):
                    self.background.sign_off_head(g, t.sequence, head - 1, rows * cols)
            if (h > 0) & (t.first == t.end):
                self.background.sign_off_head(g, t.sequence, head - 1)
        self.done_with(s, 0)
        self.next_keys(kv)
        last = again()
        self.background.sign_off_head(g, last.sequence, self.query_head(g, last, g.heads_per_kv - 1))

    def add_tile(self, g, s, t, dq, ring, head, m):
        s.ds_pipe.wait(ring)
        self.add_dq(g, s, dq, ring, self.tile_number(g, t, head, m))
        ring.advance()


def build(spec: BackwardSpec, config: GroupedConfig):
    """The kernels and their fake arguments, as ``tkq.attention.backward.dkv.build``."""
    _, arguments = build_alike(spec, config)
    return GroupedBackward(spec, config), arguments
