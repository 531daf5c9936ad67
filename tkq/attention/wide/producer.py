"""The producer warp of attention with wide heads: which task next, its tile of Q, and K and V slot by slot."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.forward.state import clipped, field_names, unclipped
from tkq.attention.wide.config import PARTS


class Producer:
    """Slots come in the order in which they are multiplied: K(n-1) | K(n-2) V(n-1) | .. | V(0); those of V by turns for
    the two output warpgroups."""

    def __init__(self, spec, config, forward):
        """forward: attention's producer, which finds a task's blocks and passes its number to the cluster."""
        self.spec, self.config, self.fields, self.forward = spec, config, field_names(spec), forward

    @cute.jit
    def run(self, g, smem):
        tk.prefetch(g.q, g.k, g.v)
        ring, q_ring, next_task_slot = smem.k_pipe.ring(), tk.ring(1), tk.ring(1)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        while number < schedule.tasks:
            t = tasks.find(number)
            seen = self.forward.seen(g, t)
            end, head = seen.first + seen.blocks, t.head // g.tasks.heads_per_kv
            # Scores of keys behind the sequence are masked, whatever they are; values there are not: 0 * NaN is NaN.
            k, k_of = unclipped(self.spec, g.k, t.batch_k, t.rows_k)
            v, v_of = clipped(self.spec, g.v, t.batch_k, t.rows_k)
            k_of, v_of = (*k_of, head), (*v_of, head)
            self.load_q(g, smem, q_ring, t, seen)
            self.load_k(smem, k, ring, (*k_of, end - 1))
            for j in cutlass.range(1, seen.blocks, unroll=1):
                self.load_k(smem, k, ring, (*k_of, end - 1 - j))
                self.load_v(smem, v, ring, v_of, end - j)
            fetched = schedule.fetch()
            self.load_v(smem, v, ring, v_of, seen.first)
            number = schedule.following(
                number, fetched, lambda found: self.forward.signal(smem, found, next_task_slot))
        self.close(smem, q_ring)

    @cute.jit
    def load_k(self, smem, k, ring, at):
        for i in cutlass.range(self.config.key_slots(self.spec.head_dim), unroll=1):
            sem = smem.k_pipe.acquire(ring)
            tk.load_async(smem.k[ring.stage], k, (*at, i), sem)
            ring.advance()

    @cute.jit
    def load_v(self, smem, v, ring, of, block):
        n, tiles = self.config.key_parts, self.config.value_tiles(self.spec.head_dim)
        for i in cutlass.range(n * tiles, unroll=1):
            for part in cutlass.range_constexpr(PARTS):
                sem = smem.v_pipe.acquire(ring)
                at = block * n + i % n, part * tiles + i // n
                tk.load_async(smem.v[ring.stage], v, (*of, *at), sem)
                ring.advance()

    @cute.jit
    def load_q(self, g, smem, ring, t, seen):
        """The Q tile, and the task with it."""
        tile = t.tile
        if cutlass.const_expr(self.config.cluster > 1):
            tile = tile * self.config.cluster + tk.cluster_rank()
        known = {**t._asdict(), "tile": tile, **vars(seen)}
        q, of = unclipped(self.spec, g.q, t.batch, t.rows_q)  # rows behind the sequence are not written
        tk.wait(smem.q_empty, ring.phase ^ 1)
        with cute.arch.elect_one():
            for f, name in enumerate(self.fields):
                smem.task[f] = Int32(known[name])
            cute.arch.mbarrier_arrive_and_expect_tx(smem.q_full.ptr, smem.q.type.bytes)
        tk.load_async(smem.q[0], q, (*of, t.head, tile, 0), smem.q_full)
        ring.advance()

    def close(self, smem, ring):
        """No more tasks."""
        tk.wait(smem.q_empty, ring.phase ^ 1)
        with cute.arch.elect_one():
            smem.task[self.fields.index("blocks")] = Int32(0)
            cute.arch.mbarrier_arrive(smem.q_full.ptr)
