"""The producer warp of a pass: which task next, the tiles that stay, and the slots that pass by."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div, most
from tkq.attention.common.query_mask import QueryExtent, key_blocks_of, query_tiles_of
from tkq.attention.forward.producer import Producer as Forward
from tkq.attention.forward.state import clipped, unclipped
from tkq.attention.wide.backward.state import fields_of
from tkq.attention.wide.config import PARTS


class PassProducer:
    """Slots come in the order in which they are multiplied, as in the forward: a step's gradient is multiplied behind
    the next step's S and dP."""

    def __init__(self, name, spec, config):
        self.by_rows, self.spec, self.config, self.fields = name == "dq", spec, config, fields_of(spec)

    @cute.jit
    def run(self, g, smem):
        tk.prefetch(*g.stay, *g.columns, g.values)
        ring, q_ring, next_task_slot = smem.k_pipe.ring(), tk.ring(1), tk.ring(1)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        while number < schedule.tasks:
            t = tasks.find(number)
            tile = t.tile if const_expr(self.by_rows) else ceil_div(t.rows_q, self.config.tile_rows) - 1 - t.tile
            first, per_head = self.seen(g, t, tile)
            heads = Int32(1) if const_expr(self.by_rows) else g.heads
            blocks = per_head * heads
            head = t.head // g.heads if const_expr(self.by_rows) else t.head * g.heads
            known = {**t._asdict(), "tile": tile, "blocks": blocks, "first": first, "per_head": per_head}
            # Rows behind the sequence are not written; of columns all that is multiplied has to be a number.
            self.load_rows(g, smem, q_ring, known)
            columns = [clipped(self.spec, x, t.batch_k, t.rows_k)[0] for x in g.columns]
            values = clipped(self.spec, g.values, t.batch_k, t.rows_k)[0]
            self.load_columns(smem, columns, ring, (t.batch_k, head), first)
            for j in cutlass.range(1, blocks, unroll=1):
                before = j - 1
                self.load_columns(smem, columns, ring, (t.batch_k, head + j // per_head), first + j % per_head)
                self.load_values(smem, values, ring, (t.batch_k, head + before // per_head), first + before % per_head)
            fetched = schedule.fetch()
            self.load_values(smem, values, ring, (t.batch_k, head + heads - 1), first + per_head - 1)
            number = schedule.following(
                number, fetched, lambda found: Forward.signal(self, smem, found, next_task_slot))
        self.close(smem, q_ring)

    def seen(self, g, t, tile):
        """(the first block of columns, how many: 1 or more, also where none is seen), of a cluster's task."""
        rows, cols, others = self.config.tile_rows, self.config.kv, most(t.rows_k, 1)
        sizes = (t.rows_q, others, rows, cols) if self.by_rows else (others, t.rows_q, cols, rows)
        e = QueryExtent(*sizes, g.left, g.right)
        found = (key_blocks_of if self.by_rows else query_tiles_of)(e, tile * rows)
        first = most(found.first, 0)
        return first, most(found.end - first, 1)

    def load_rows(self, g, smem, ring, known):
        """The tiles that stay, and the task with them."""
        if self.config.cluster > 1:
            known["tile"] = known["tile"] * self.config.cluster + tk.cluster_rank()
        tk.wait(smem.q_empty, ring.phase ^ 1)
        with cute.arch.elect_one():
            for f, name in enumerate(self.fields):
                smem.task[f] = Int32(known[name])
            cute.arch.mbarrier_arrive_and_expect_tx(smem.q_full.ptr, len(g.stay) * smem.stay[0].type.bytes)
        for to, x in zip(smem.stay, g.stay):
            x, of = unclipped(self.spec, x, known["batch"], known["rows_q"])
            tk.load_async(to[0], x, (*of, known["head"], known["tile"], 0), smem.q_full)
        ring.advance()

    @cute.jit
    def load_columns(self, smem, columns, ring, of, block):
        for x in columns:
            for i in cutlass.range(self.spec.width // self.config.key_cols, unroll=1):
                sem = smem.k_pipe.acquire(ring)
                tk.load_async(smem.k[ring.stage], x, (*of, block, i), sem)
                ring.advance()

    @cute.jit
    def load_values(self, smem, values, ring, of, block):
        n, tiles = self.config.key_parts, self.config.value_tiles(self.spec.width)
        for i in cutlass.range(n * tiles, unroll=1):
            for part in cutlass.range_constexpr(PARTS):
                sem = smem.v_pipe.acquire(ring)
                at = block * n + i % n, part * tiles + i // n
                tk.load_async(smem.v[ring.stage], values, (*of, *at), sem)
                ring.advance()

    def close(self, smem, ring):
        """No more tasks."""
        tk.wait(smem.q_empty, ring.phase ^ 1)
        with cute.arch.elect_one():
            smem.task[self.fields.index("blocks")] = Int32(0)
            cute.arch.mbarrier_arrive(smem.q_full.ptr)
