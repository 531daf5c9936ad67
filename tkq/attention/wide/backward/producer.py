"""The producer warp of a pass: which task next, the tiles that stay, and the slots that pass by."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.integers import most
from tkq.attention.common.query_mask import QueryExtent, key_blocks_of, query_tiles_of
from tkq.attention.forward.producer import Producer as Forward
from tkq.attention.wide.backward.state import FIELDS
from tkq.attention.wide.config import PARTS


class PassProducer:
    """Slots come in the order in which they are multiplied, as in the forward: a step's gradient is multiplied behind
    the next step's S and dP."""

    def __init__(self, name, spec, config):
        self.by_rows, self.spec, self.config = name == "dq", spec, config

    @cute.jit
    def run(self, g, smem):
        tk.prefetch(*g.stay, *g.columns, g.values)
        ring, q_ring, next_task_slot = smem.k_pipe.ring(), tk.ring(1), tk.ring(1)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        while number < schedule.tasks:
            t = tasks.find(number)
            tile = t.tile if const_expr(self.by_rows) else g.tasks.tiles - 1 - t.tile
            first, per_head = self.seen(g, tile)
            heads = Int32(1) if const_expr(self.by_rows) else g.heads
            blocks = per_head * heads
            head = t.head // g.heads if const_expr(self.by_rows) else t.head * g.heads
            self.load_rows(g, smem, q_ring, (t.batch, t.head, tile, blocks, first, per_head))
            self.load_columns(g, smem, ring, (t.batch, head), first)
            for j in cutlass.range(1, blocks, unroll=1):
                self.load_columns(g, smem, ring, (t.batch, head + j // per_head), first + j % per_head)
                self.load_values(g, smem, ring, (t.batch, head + (j - 1) // per_head), first + (j - 1) % per_head)
            fetched = schedule.fetch()
            self.load_values(g, smem, ring, (t.batch, head + heads - 1), first + per_head - 1)
            number = schedule.following(
                number, fetched, lambda found: Forward.signal(self, smem, found, next_task_slot))
        self.close(smem, q_ring)

    def seen(self, g, tile):
        """(the first block of columns, how many: 1 or more, also where none is seen), of a cluster's task."""
        rows, cols = self.config.tile_rows, self.config.kv
        sizes = (rows, cols) if self.by_rows else (cols, rows)
        e = QueryExtent(g.rows_q, g.rows_k, *sizes, g.left, g.right)
        found = (key_blocks_of if self.by_rows else query_tiles_of)(e, tile * rows)
        first = most(found.first, 0)
        return first, most(found.end - first, 1)

    def load_rows(self, g, smem, ring, task):
        """The tiles that stay, and the task with them."""
        batch, head, tile, *_ = task
        if self.config.cluster > 1:
            tile = tile * self.config.cluster + tk.cluster_rank()
        known = dict(zip(FIELDS, task), tile=tile)
        tk.wait(smem.q_empty, ring.phase ^ 1)
        with cute.arch.elect_one():
            for f, name in enumerate(FIELDS):
                smem.task[f] = Int32(known[name])
            cute.arch.mbarrier_arrive_and_expect_tx(smem.q_full.ptr, len(g.stay) * smem.stay[0].type.bytes)
        for to, x in zip(smem.stay, g.stay):
            tk.load_async(to[0], x, (batch, head, tile, 0), smem.q_full)
        ring.advance()

    @cute.jit
    def load_columns(self, g, smem, ring, of, block):
        for x in g.columns:
            for i in cutlass.range(self.spec.width // self.config.key_cols, unroll=1):
                sem = smem.k_pipe.acquire(ring)
                tk.load_async(smem.columns[ring.stage], x, (*of, block, i), sem)
                ring.advance()

    @cute.jit
    def load_values(self, g, smem, ring, of, block):
        n, tiles = self.config.key_parts, self.config.value_tiles(self.spec.width)
        for i in cutlass.range(n * tiles, unroll=1):
            for part in cutlass.range_constexpr(PARTS):
                sem = smem.v_pipe.acquire(ring)
                at = block * n + i % n, part * tiles + i // n
                tk.load_async(smem.v[ring.stage], g.values, (*of, *at), sem)
                ring.advance()

    def close(self, smem, ring):
        """No more tasks."""
        tk.wait(smem.q_empty, ring.phase ^ 1)
        with cute.arch.elect_one():
            smem.task[FIELDS.index("blocks")] = Int32(0)
            cute.arch.mbarrier_arrive(smem.q_full.ptr)
