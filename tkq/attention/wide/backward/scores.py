"""The score warpgroup of a pass: S and dP, and of them P or dS."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.query_mask import QueryExtent, mask_limits
from tkq.attention.forward.state import Fields
from tkq.attention.wide.backward.state import PassState, PassTiles, fields_of
from tkq.attention.wide.config import ROWS
from tkq.attention.wide.products import (
    Slots,
    hand_over_factors,
    hand_over_last,
    multiply,
    store_moved,
    store_tile,
    take_task,
)

INF = Float32.inf


class PassScores:
    """P = exp2(scale * S - lse), dS = P * (dP - delta), with rows of queries (dq) or of keys (dk, dv: transposed)."""

    def __init__(self, name, spec, config):
        self.name, self.spec, self.config, self.tiles = name, spec, config, PassTiles.of(spec, config)
        self.by_rows, self.two = name == "dq", config.products == 2
        self.slots = Slots(config, spec.width)

    def state(self, smem):
        cols, vector = self.config.kv, tk.rv if self.by_rows else lambda: tk.cv(self.config.kv)
        return PassState(
            s=tk.rt_fl(cols), dp=tk.rt_fl(cols) if self.two else None, x=tk.rt(cols, self.tiles.rows.dtype),
            lse=vector(), delta=vector() if self.two else None, task=Fields.new(fields_of(self.spec)),
            ring=smem.k_pipe.ring(), q=tk.ring(1), p_ring=smem.p_pipe.ring(), end=smem.end_pipe.ring(),
            by_rows=self.by_rows)

    @cute.jit
    def run(self, g, smem):
        regs = self.state(smem)
        store_moved(smem, Int32(0))  # the output warpgroups are the forward's, which correct O
        blocks = take_task(smem, regs.q, regs.task)
        while blocks > 0:
            if const_expr(self.by_rows):
                self.load_row_stats(g, regs)
            self.step(g, smem, regs, Int32(0), True)
            for i in cutlass.range(1, blocks, unroll=1):
                self.step(g, smem, regs, i, False)
            self.end(g, smem, regs)
            blocks = take_task(smem, regs.q, regs.task)

    def load_row_stats(self, g, regs):
        t, row, batch = regs.task, regs.task["tile"] * ROWS, regs.task["batch"]
        if self.spec.varlen:
            row, batch = row + batch - t["rows_q"], 0
        for v, n in ((regs.lse, 0), (regs.delta, 1)):
            tk.load_rows(v, g.stats[n, batch, t["head"], None], row, g.stats.shape[3])

    def step(self, g, smem, regs, i, first):
        if not self.by_rows:
            self.load_column_stats(g, regs, i)
        multiply(self, smem, regs, first)
        if self.spec.softcap:
            tk.mul(regs.s, regs.s, g.cap)
            tk.tanh(regs.s, regs.s)
        if self.two:
            self.weights(regs)
        self.mask(g, regs, i)
        self.gradient(g, regs)

    def weights(self, regs):
        """What P is multiplied by: dP - delta, and with a softcap its derivative."""
        (tk.add_row if self.by_rows else tk.add_col)(regs.dp, regs.dp, regs.delta)
        if self.spec.softcap:
            tk.apply(regs.dp, lambda w, t: w * (Float32(1.0) - t * t), regs.dp, regs.s)

    def load_column_stats(self, g, regs, i):
        t, batch = regs.task, regs.task["batch"]
        head, col = t["head"] * g.heads + i // t["per_head"], self.block(regs, i) * self.config.kv
        if self.spec.varlen:
            col, batch = col + t["batch_k"] - t["rows_k"], 0
        for v, n in ((regs.lse, 0), (regs.delta, 1))[:self.config.products]:
            tk.load_cols(v, g.stats[n, batch, head, None], col, g.stats.shape[3])

    def block(self, regs, i):
        return regs.task["first"] + i % regs.task["per_head"]

    def gradient(self, g, regs):
        """X: P, or dS, in 16 bits."""
        tk.mul(regs.s, regs.s, g.scale)
        (tk.add_row if self.by_rows else tk.add_col)(regs.s, regs.s, regs.lse)
        tk.exp2(regs.s, regs.s)
        if self.two:
            tk.mul(regs.s, regs.s, regs.dp)
        tk.copy(regs.x, regs.s)

    @cute.jit
    def mask(self, g, regs, i):
        """The scores of what does not see each other, and of columns behind the last, become -inf."""
        cols = self.config.kv
        first, end = self.limits(g, regs, i)
        if const_expr(first is not None):
            if first + ROWS > 0:
                tk.left_fill(regs.s, first, -INF, diagonal=1)
        if const_expr(end is not None):
            if end < cols:
                tk.right_fill(regs.s, end, -INF, diagonal=1)
        rest = g.tasks.lengths(regs.task)[1] - self.block(regs, i) * cols
        if rest < cols:
            tk.right_fill(regs.s, rest, -INF)
            if const_expr(self.two):  # delta of rows that are not the sequence's may be NaN
                tk.right_fill(regs.dp, rest, 0.0)

    def limits(self, g, regs, i):
        """(first, end): the tile's first row sees the columns from ``first`` to ``end``, each further row those one
        further. None: no limit on that side."""
        row, block, cols = regs.task["tile"] * ROWS, self.block(regs, i), self.config.kv
        mine, others = g.tasks.lengths(regs.task)
        if not self.by_rows:
            return mask_limits(QueryExtent(others, mine, cols, ROWS, g.left, g.right), row, block)
        own = row + others - mine - block * cols
        return None if g.left is None else own - g.left, None if g.right is None else own + g.right + 1

    def operands(self, smem, regs, i):
        """Of the product with slot i of the columns."""
        per = self.slots.own // self.config.products
        return (regs.s, regs.dp)[i // per], smem.parts[i // per][i % per], i % per == 0

    def store(self, smem, regs):
        store_tile(smem, regs.x, self.config)
        tk.publish()

    def end(self, g, smem, regs):
        """The last X, and the gradient's factor."""
        hand_over_last(self, smem, regs)
        factor = tk.rv()
        tk.fill(factor, g.factor)
        hand_over_factors(smem, regs, factor)
