"""The producer warp of float8 attention: which task next, and its tiles of Q, K and V."""
import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.attention.forward.producer import Producer as ForwardProducer
from tkq.attention.forward.state import unclipped
from tkq.attention.fp8 import packed
from tkq.attention.fp8.spec import KEYS_TOGETHER
from tkq.attention.fp8.state import field_names


class Producer:
    """As of ``tkq.attention.forward``, of a V that is transposed: its tiles lie side by side along the keys. Of packed
    sequences each begins with a tile of its own there, and has zeros behind its last key."""

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.forward = ForwardProducer(spec, config, field_names(spec))

    @cute.jit
    def run(self, g, smem):
        tk.prefetch(g.q, g.k, g.v)
        k_ring, v_ring, q_ring = smem.k_pipe.ring(), smem.v_pipe.ring(), tk.ring(self.config.q_stages)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        while number < schedule.tasks:
            t = tasks.find(number)
            seen = self.forward.seen(g, t)
            end, head = seen.first + seen.blocks, t.head // g.tasks.heads_per_kv
            # Scores of keys behind the sequence are masked, whatever they are.
            k, of = unclipped(self.spec, g.k, t.batch_k, t.rows_k)
            of, (of_v, first_v) = (*of, head), self.values_of(t, head, g)
            self.forward.load(smem.k, k, smem.k_pipe, k_ring, of, end - 1)
            self.forward.load_q(g, smem, q_ring, t, seen)
            for j in cutlass.range(1, seen.blocks, unroll=1):
                self.forward.load(smem.k, k, smem.k_pipe, k_ring, of, end - 1 - j)
                self.load_v(g, smem, v_ring, of_v, first_v + end - j)
            fetched = schedule.fetch()
            self.load_v(g, smem, v_ring, of_v, first_v + seen.first)
            number = schedule.following(number, fetched)
        self.forward.close(smem, q_ring)

    def values_of(self, t, head, g):
        """(what comes before the coordinates of a tile of V, the task's sequence's first block there)"""
        if not self.spec.varlen:
            return (t.batch_k, head), 0
        tile = packed.first_tile(g.tasks, t.sequence, t.batch_k - t.rows_k)
        return (head,), tile * (KEYS_TOGETHER // self.config.kv)

    def load_v(self, g, smem, ring, of, block):
        sem = smem.v_pipe.acquire(ring)
        tk.load_async(smem.v[ring.stage], g.v, (*of, 0, block), sem)
        ring.advance()
