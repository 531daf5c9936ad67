"""Attention's backward for query heads that share a K/V head.

A task has several query heads, and blocks of keys of a causal problem, which take unequally long, are soon at different
ones: more than L2 holds is at work at once. So parts of the query heads have tasks of their own, as in ``gqa_split``,
those of a K/V head as far apart as there are blocks at once. The helper warps count zeroed, added and converted tiles
by query head, not by K/V head: dQ of the first is converted while the next ones are added up. The dQ warps that have no
task left help to convert."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention.backward.dkv import AttentionBackward
from tkq.attention.backward.dkv import build as build_alike
from tkq.attention.backward.gqa_config import GqaConfig
from tkq.attention.backward.gqa_split import pass_on_dkv
from tkq.attention.backward.helper_warps import GqaHelperWarps
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.backward.state import Task
from tkq.attention.common.query_mask import query_tiles_of, tile_of_task
from tkq.attention.common.tile_order import part_in_order


class GqaBackward(AttentionBackward):
    """See ``AttentionBackward``; of equal sequences."""

    def __init__(self, spec: BackwardSpec, config: GqaConfig):
        if spec.varlen or spec.left:
            raise NotImplementedError("attention backward: helper_warps by query heads, of packed sequences or with a "
                                      "limit on the left")
        super().__init__(spec, config)
        self.helper_warps = GqaHelperWarps(spec, config, self.head_in_order)

    # ---- host ----------------------------------------------------------------------------------

    def parts_of_heads(self, heads, kv_heads):
        heads_per_task = self.config.heads_per_task
        if not heads_per_task:
            return super().parts_of_heads(heads, kv_heads)
        of_task = cutlass.select_(heads // kv_heads % heads_per_task == 0, Int32(heads_per_task), Int32(1))
        return heads // of_task, heads // kv_heads // of_task

    def parts_of(self, workspace, tiles, heads, blocks=None):
        """With counters for as many query heads as there are tiles, or fewer, and one more."""
        return super().parts_of(workspace, tiles, tiles + 1, blocks)

    def helper_operands(self, dq, counters, zero_ahead, num_sms):
        return super().helper_operands(dq, counters, zero_ahead * self.config.tail_waves, num_sms)

    # ---- device --------------------------------------------------------------------------------

    @cute.jit
    def write_both(self, g, t, c, number):
        if const_expr(self.config.heads_per_task):
            if self.pass_on_dkv(g, t, c, number):
                AttentionBackward.write_both(self, g, t, c, number)
        else:
            AttentionBackward.write_both(self, g, t, c, number)

    def pass_on_dkv(self, g, t, c, number):
        """From one part of the query heads to the next. Is this the last, which has the sums?"""
        blocks = g.tasks // (g.layout.batches * g.kv_heads)
        place = (t.sequence * (g.kv_heads // g.splits_per_kv_head) + self.kv_head(g, t)) * (2 * blocks) + number
        return pass_on_dkv(g.dkv_partials, place, t.head % g.splits_per_kv_head, g.splits_per_kv_head, (c.dk, c.dv))

    def kv_head(self, g, t):
        return t.head // g.splits_per_kv_head if self.config.heads_per_task else t.head

    @cute.jit
    def find_task(self, g, i):
        """Task i."""
        c = self.config

        def order(index, blocks, heads, rows_q):
            head, block = tile_of_task(index, blocks, heads, g.l2_section,
                                       const_expr(self.spec.right and c.longest_first),
                                       g.tail_heads * c.tail_waves)
            return self.head_in_order(g, head), block

        at = g.layout.at(True, c.block, i, g.kv_heads, order)
        r = query_tiles_of(self.extent(g, at.rows_q, at.rows_k), at.number * c.block)
        first = g.layout.first_tile(at, c.tile, g.heads, g.tiles)
        return Task(at.sequence, at.rows_q, at.rows_k, at.batch_q, at.batch_k, first, at.head, at.number, r.first,
                    r.first_unmasked, r.end_unmasked, r.end)

    def head_in_order(self, g, head):
        """Head ``head`` in the order of work."""
        if not self.config.heads_per_task:
            return head
        return part_in_order(head, g.kv_heads * g.layout.batches, g.splits_per_kv_head, g.l2_section, g.tail_heads)

    @cute.jit
    def dq_warpgroup(self, g, s):
        dq, ring, kv = tk.rt_fl(self.config.dq_cols), s.ds_pipe.ring(), tk.ring(1)
        cute.arch.griddepcontrol_wait()  # the counters are zero
        self.each_task(g, s, lambda t, reload_task: self.add_by_heads(g, s, t, reload_task, dq, ring, kv))
        self.helper_warps.run(g)

    @cute.jit
    def add_by_heads(self, g, s, t, reload_task: Constexpr, dq, ring, kv):
        rows, cols = self.config.dq_parts(self.spec.width)
        tk.wait(s.kv_full[0], kv.phase)
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            head = self.query_head(g, t, h)
            self.helper_warps.wait_head(g, t, head)
            for m in cutlass.range(t.first, t.end, unroll=1):
                self.add_tile(g, s, t, dq, ring, head, m)
                if (h > 0) & (m == t.first):
                    self.helper_warps.signal_head_added(g, t.sequence, head - 1, rows * cols)
            if (h > 0) & (t.first == t.end):
                self.helper_warps.signal_head_added(g, t.sequence, head - 1)
        self.release_kv(s, 0)
        self.next_kv(kv)
        last = reload_task()
        self.helper_warps.signal_head_added(g, last.sequence, self.query_head(g, last, g.heads_per_kv - 1))

    def add_tile(self, g, s, t, dq, ring, head, m):
        s.ds_pipe.wait(ring)
        self.add_dq(g, s, dq, ring, self.tile_number(g, t, head, m))
        ring.advance()


def build(spec: BackwardSpec, config: GqaConfig):
    """The kernels and their fake arguments, as ``tkq.attention.backward.dkv.build``."""
    _, arguments = build_alike(spec, config)
    return GqaBackward(spec, config), arguments
