"""The score warpgroup of a pass: S and dP, and of them P or dS."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.query_mask import QueryExtent, mask_limits
from tkq.attention.forward.state import Fields
from tkq.attention.wide.backward.state import FIELDS, PassState, PassTiles
from tkq.attention.wide.config import PARTS, ROWS
from tkq.attention.wide.scores import STORE_UNDER, release_before, store_factors, take_task
from tkq.attention.wide.state import skip

INF = Float32.inf


class PassScores:
    """P = exp2(scale * S - lse), dS = P * (dP - delta), with rows of queries (dq) or of keys (dk, dv: transposed)."""

    def __init__(self, name, spec, config):
        self.name, self.spec, self.config, self.tiles = name, spec, config, PassTiles.of(spec, config)
        self.by_rows, self.two = name == "dq", config.products == 2
        self.slots, self.others = config.key_slots(spec.width), PARTS * config.value_slots(spec.width)

    def state(self, smem):
        cols, vector = self.config.kv, tk.rv if self.by_rows else lambda: tk.cv(self.config.kv)
        return PassState(
            s=tk.rt_fl(cols), dp=tk.rt_fl(cols) if self.two else None, x=tk.rt(cols, self.tiles.rows.dtype),
            lse=vector(), delta=vector() if self.two else None, task=Fields.new(FIELDS), ring=smem.k_pipe.ring(),
            q=tk.ring(1), p_ring=smem.p_pipe.ring(), end=smem.end_pipe.ring(), by_rows=self.by_rows)

    @cute.jit
    def run(self, g, smem):
        regs = self.state(smem)
        self.never_moved(smem)
        blocks = take_task(smem, regs.q, regs.task)
        while blocks > 0:
            if const_expr(self.by_rows):
                self.load_row_stats(g, regs)
            self.step(g, smem, regs, Int32(0), True)
            for i in cutlass.range(1, blocks, unroll=1):
                self.step(g, smem, regs, i, False)
            self.end(g, smem, regs)
            blocks = take_task(smem, regs.q, regs.task)

    @cute.jit
    def never_moved(self, smem):
        """The output warpgroups are the forward's, which correct O where a maximum has moved."""
        moved = smem.moved
        if tk.lane_id() == 0:
            moved[tk.warp_id() % 4] = Int32(0)

    def load_row_stats(self, g, regs):
        t, row = regs.task, regs.task["tile"] * ROWS
        for v, n in ((regs.lse, 0), (regs.delta, 1)):
            tk.load_rows(v, g.stats[n, t["batch"], t["head"], None], row, g.stats.shape[3])

    def step(self, g, smem, regs, i, first):
        if not self.by_rows:
            self.load_column_stats(g, regs, i)
        self.products(smem, regs, first)
        self.mask(g, regs, i)
        self.gradient(g, regs)

    def load_column_stats(self, g, regs, i):
        t = regs.task
        head, col = t["head"] * g.heads + i // t["per_head"], self.block(regs, i) * self.config.kv
        for v, n in ((regs.lse, 0), (regs.delta, 1))[:self.config.products]:
            tk.load_cols(v, g.stats[n, t["batch"], head, None], col, g.stats.shape[3])

    def block(self, regs, i):
        return regs.task["first"] + i % regs.task["per_head"]

    def gradient(self, g, regs):
        """X: P, or dS, in 16 bits."""
        add = tk.add_row if self.by_rows else tk.add_col
        tk.mul(regs.s, regs.s, g.scale)
        add(regs.s, regs.s, regs.lse)
        tk.exp2(regs.s, regs.s)
        if self.two:
            add(regs.dp, regs.dp, regs.delta)
            tk.mul(regs.s, regs.s, regs.dp)
        tk.copy(regs.x, regs.s)

    @cute.jit
    def mask(self, g, regs, i):
        """The scores of what does not see each other become -inf. Queries behind the last have an lse of -inf."""
        cols = self.config.kv
        first, end = self.limits(g, regs, i)
        if const_expr(first is not None):
            if first + ROWS > 0:
                tk.left_fill(regs.s, first, -INF, diagonal=1)
        if const_expr(end is not None):
            if end < cols:
                tk.right_fill(regs.s, end, -INF, diagonal=1)
        if const_expr(self.by_rows):
            keys = g.rows_k - self.block(regs, i) * cols
            if keys < cols:
                tk.right_fill(regs.s, keys, -INF)

    def limits(self, g, regs, i):
        """(first, end): the tile's first row sees the columns from ``first`` to ``end``, each further row those one
        further. None: no limit on that side."""
        row, block, cols = regs.task["tile"] * ROWS, self.block(regs, i), self.config.kv
        if not self.by_rows:
            return mask_limits(QueryExtent(g.rows_q, g.rows_k, cols, ROWS, g.left, g.right), row, block)
        own = row + g.rows_k - g.rows_q - block * cols
        return None if g.left is None else own - g.left, None if g.right is None else own + g.right + 1

    @cute.jit
    def products(self, smem, regs, first: Constexpr[bool]):
        """S and dP, slot by slot. Under them X of the step before goes to the outputs: see the forward's ``Scores``."""
        per = self.slots // self.config.products
        for i in cutlass.range_constexpr(self.slots):
            smem.k_pipe.wait(regs.ring)
            d, a = (regs.s, regs.dp)[i // per], smem.parts[i // per][i % per]
            if const_expr(i % per == 0):
                tk.mm_ABt(d, a, smem.columns[regs.ring.stage])
            else:
                tk.mma_ABt(d, a, smem.columns[regs.ring.stage])
            if const_expr(i > 0):
                tk.mma_wait(1)
                release_before(smem.k_pipe, regs.ring, 1)
            regs.ring.advance()
            if const_expr(not first and i == STORE_UNDER):
                self.store(smem, regs)
            if const_expr(not first and i == self.slots - self.config.early):
                self.commit(smem, regs)
        tk.mma_wait(0)
        release_before(smem.k_pipe, regs.ring, 1)
        if const_expr(not first):
            skip(regs.ring, self.others)
            if const_expr(self.config.early == 0):
                self.commit(smem, regs)

    def store(self, smem, regs):
        cols = self.config.value_keys
        smem.p_pipe.acquire_empty(regs.p_ring)
        for i in range(self.config.key_parts):
            tk.store(smem.p[i], tk.columns(regs.x, i * cols, cols))
        tk.publish()

    def commit(self, smem, regs):
        smem.p_pipe.commit(regs.p_ring)
        regs.p_ring.advance()

    def end(self, g, smem, regs):
        """The last X, and the gradient's factor."""
        tk.arrive(smem.q_empty)
        self.store(smem, regs)
        self.commit(smem, regs)
        skip(regs.ring, self.others)
        factor = tk.rv()
        tk.fill(factor, g.factor)
        smem.end_pipe.acquire_empty(regs.end)
        store_factors(smem, factor, 1)
        smem.end_pipe.commit(regs.end)
        regs.end.advance()


