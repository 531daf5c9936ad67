"""The producer warp of float8 attention: which task next, and its tiles of Q, K and V."""
import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.attention.forward.producer import Producer as ForwardProducer


class Producer:
    """As of ``tkq.attention.forward``, of a V that is transposed: its tiles lie side by side along the keys."""

    def __init__(self, spec, config):
        self.config, self.forward = config, ForwardProducer(spec, config)

    @cute.jit
    def run(self, g, smem):
        tk.prefetch(g.q, g.k, g.v)
        k_ring, v_ring, q_ring = smem.k_pipe.ring(), smem.v_pipe.ring(), tk.ring(self.config.q_stages)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        while number < schedule.tasks:
            t = tasks.find(number)
            seen = self.forward.seen(g, t)
            end, of = seen.first + seen.blocks, (t.batch_k, t.head // g.tasks.heads_per_kv)
            self.forward.load(smem.k, g.k, smem.k_pipe, k_ring, of, end - 1)
            self.forward.load_q(g, smem, q_ring, t, seen)
            for j in cutlass.range(1, seen.blocks, unroll=1):
                self.forward.load(smem.k, g.k, smem.k_pipe, k_ring, of, end - 1 - j)
                self.load_v(g, smem, v_ring, of, end - j)
            fetched = schedule.fetch()
            self.load_v(g, smem, v_ring, of, seen.first)
            number = schedule.following(number, fetched)
        self.forward.close(smem, q_ring)

    def load_v(self, g, smem, ring, of, block):
        sem = smem.v_pipe.acquire(ring)
        tk.load_async(smem.v[ring.stage], g.v, (*of, 0, block), sem)
        ring.advance()
