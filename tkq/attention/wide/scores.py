"""The score warpgroup of attention with wide heads: S = Q @ K.T and its softmax."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.forward.softmax import LEFT, RIGHT, Softmax
from tkq.attention.forward.state import Fields, field_names
from tkq.attention.wide.products import (
    Slots,
    hand_over_factors,
    hand_over_last,
    multiply,
    store_factors,
    store_moved,
    store_tile,
    take_task,
)
from tkq.attention.wide.state import ScoreState, Tiles


class Scores:
    """A thread has S and, in 16 bits, P of the block before: P's shared tile is free only when the outputs have
    multiplied the one before that."""

    def __init__(self, spec, config):
        self.spec, self.config, self.softmax = spec, config, Softmax(spec, config)
        self.tiles, self.fields = Tiles.of(spec, config), field_names(spec)
        self.slots = Slots(config, spec.head_dim)

    def state(self, smem):
        kv = self.config.kv
        return ScoreState(
            s=tk.rt_fl(kv), p=tk.rt(kv, self.tiles.q.dtype), max=tk.rv(), norm=tk.rv(), correct=tk.rv(), shift=tk.rv(),
            last_max=tk.rv(), last_norm=tk.rv(), moved=cute.make_rmem_tensor((1,), Int32), task=Fields.new(self.fields),
            last=Fields.new(self.fields), ring=smem.k_pipe.ring(), q=tk.ring(1), p_ring=smem.p_pipe.ring(),
            end=smem.end_pipe.ring(), wg=Int32(0))

    @cute.jit
    def run(self, g, smem):
        regs = self.state(smem)
        blocks = take_task(smem, regs.q, regs.task)
        while blocks > 0:
            multiply(self, smem, regs, True)
            self.first(g, regs)
            self.steps(g, smem, regs)
            self.end(g, smem, regs)
            blocks = take_task(smem, regs.q, regs.task)

    @cute.jit
    def steps(self, g, smem, regs):
        """Each further block of the visit."""
        for i in cutlass.range(1, regs.task["blocks"], unroll=1):
            multiply(self, smem, regs, False)
            self.softmax_of(g, regs, i)
            tk.copy(regs.p, regs.s)

    @cute.jit
    def softmax_of(self, g, regs, i):
        """Of the i-th block of the visit: those with a mask on the right come first, on the left last."""
        masked, whole = Int32(1), regs.task["blocks"]
        if const_expr(self.spec.causal or self.spec.right):
            masked = regs.task["n_masked_right"]
        if const_expr(self.spec.left):
            whole = whole - regs.task["n_masked_left"]
        if const_expr(self.spec.causal or self.spec.right):
            if i < masked:
                self.step(g, regs, i, RIGHT | LEFT)
        if const_expr(self.spec.left):
            if i >= whole:
                self.step(g, regs, i, LEFT)
        if i >= masked and i < whole:
            self.step(g, regs, i, 0)

    def first(self, g, regs):
        """The first softmax of a task."""
        self.softmax.first(g, regs)
        regs.moved[0] = Int32(0)
        tk.copy(regs.p, regs.s)

    def step(self, g, regs, i, sides):
        regs.moved[0] = Int32(self.softmax.step(g, regs, i, sides))

    def operands(self, smem, regs, i):
        """Of the product with K slot i."""
        return regs.s, smem.q_parts[i], i == 0

    @cute.jit
    def store(self, smem, regs):
        """P, and by what O is to be multiplied before."""
        store_tile(smem, regs.p, self.config)
        if regs.moved[0] != 0:
            store_factors(smem, regs.correct, 0)
        store_moved(smem, regs.moved[0])
        tk.publish()

    def end(self, g, smem, regs):
        """The last P, and what O is to be divided by; the log-sum-exp."""
        hand_over_last(self, smem, regs)
        for f in range(len(self.fields)):
            regs.last.values[f] = regs.task.values[f]
        tk.copy(regs.last_max, regs.max)
        tk.copy(regs.last_norm, regs.norm)
        lse = tk.rv()
        self.softmax.statistics(g, regs, lse)
        hand_over_factors(smem, regs, regs.last_norm)
        if self.spec.lse:
            self.store_lse(g, regs.last, lse)

    def store_lse(self, g, t, lse):
        first, end = rows_of(self.spec, g, t)
        of = g.lse[t["head"], None] if self.spec.varlen else g.lse[t["batch"], t["head"], None]
        tk.store_rows(of, lse, first + t["tile"] * self.config.rows, end)


def rows_of(spec, g, t):
    """(first, end) of the sequence's rows in lse, and in O as a tile has it; packed heads' rows each by itself."""
    rows = g.tasks.lengths(t)[0]
    first = (t["batch"] - rows) * spec.pack if spec.varlen else 0
    return first, first + rows * spec.pack
