"""``FirstStores`` whose dQ is finished under the products: the background has nothing else to do."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

import tkq.tile as tk
from tkq.attention.backward_background import FINISHED, WARP, columns
from tkq.attention.backward_base import BackwardBase
from tkq.attention.backward_first import FirstStores
from tkq.attention.backward_first_config import FinishConfig
from tkq.attention.backward_grouped import GroupedBackground, GroupedBackward
from tkq.attention.backward_seamless_background import await_patiently
from tkq.attention.backward_spec import BackwardSpec
from tkq.attention.backward_split import load_acquire
from tkq.attention.backward_tasks import claim
from tkq.attention.launch import BackwardOperands, Gradients, Sequences  # noqa: F401


class FinishesTiles(GroupedBackground):
    """Makes dQ of what has been added, of no zeroes. ``Counters.ready`` are the tiles' words."""

    @cute.jit
    def run(self, g):
        counters, tiles = g.background.counters, cute.size(g.acc, mode=[0])
        cute.arch.griddepcontrol_wait()  # the counters are zero
        n = claim(counters.next, FINISHED)
        while n < tiles:
            at = self.tile(g, n)
            await_patiently(counters.added, self.head(g, at), 4 * self.blocks(at.rows_k))
            self.convert(g, self.tile(g, n))
            n = claim(counters.next, FINISHED)

    @cute.jit
    def convert(self, g, at):
        """As ``BackwardBackground``'s; of a tile that is nobody's dQ is 0."""
        c, (rows, cols) = self.config, self.config.dq_parts(self.spec.width)
        slabs, quads = 4 * rows * cols, c.dq_cols // 8
        number = self.number(g, at)
        acc = cute.make_tensor(g.acc[number, None].iterator, cute.make_layout((4, WARP, quads, slabs)))
        there = load_acquire(g.background.counters.ready, Int32(number)) > 0
        out = g.background.dq[at.batch, None, at.head, None]
        first = at.start_q + at.number * c.tile
        for i in cutlass.range(slabs * (c.dq_cols // 32), unroll=1):
            slab, part = i // (c.dq_cols // 32), i % (c.dq_cols // 32)
            x = tk.rt_fl(32)
            tk.zero(x)
            if there:
                self.load(x, acc[None, tk.lane_id(), None, slab], 4 * part)
            tk.mul(x, x, g.scale)
            row = first + slab // 4 // cols * 64 + (slab % 4 - tk.warp_id() % 4) * 16  # of a warpgroup's first
            col = slab // 4 % cols * c.dq_cols + 32 * part
            tk.store_narrow(columns(out, col), x, row, at.start_q + at.rows_q)


class FirstFinishes(FirstStores):
    """``FirstStores``; background (warps 1-3): the next tile of dQ, when all has been added to it."""

    def __init__(self, spec: BackwardSpec, config: FinishConfig):
        super().__init__(spec, config)
        self.background = FinishesTiles(spec, config, self.turn)

    __call__ = GroupedBackward.__call__
    in_background = GroupedBackward.in_background
    first_role = BackwardBase.first_role
    queries = GroupedBackward.queries

    def words(self, g):
        return g.background.counters.ready

    @cute.jit
    def add_by_heads(self, g, s, t, again: Constexpr, dq, ring, kv):
        rows, cols = self.config.dq_parts(self.spec.width)
        tk.wait(s.kv_full[0], kv.phase)
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            head = self.query_head(g, t, h)
            for m in cutlass.range(t.first, t.end, unroll=1):
                self.store_or_add_tile(g, s, t, dq, ring, self.tile_number(g, t, head, m))
                if (h > 0) & (m == t.first):
                    self.background.sign_off_head(g, t.sequence, head - 1, rows * cols)
            if (h > 0) & (t.first == t.end):
                self.background.sign_off_head(g, t.sequence, head - 1)
        self.done_with(s, 0)
        self.next_keys(kv)
        last = again()
        self.background.sign_off_head(g, last.sequence, self.query_head(g, last, g.heads_per_kv - 1))
