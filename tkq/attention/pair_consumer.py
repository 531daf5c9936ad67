"""A consumer warpgroup of a block of a pair: as ``Consumer``, but some slots of the pipes it lets pass."""
import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.attention.consumer import Consumer
from tkq.attention.pair_producer import pair_fields


class PairConsumer(Consumer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = pair_fields(spec)

    @cute.jit
    def run(self, g, s, wg):
        c = self.registers(s, wg)
        c.turns.start()
        if tk.cluster_rank() == 0:  # its first slot is empty
            self.let_pass(s, c, 1)
        blocks = self.next_task(s, c)
        while blocks > 0:
            self.let_pass(s, c, c.task["before"])
            self.begin(g, s, c)
            tk.zero(c.o)
            self.steps(g, s, c)
            tk.arrive(s.q_empty[self.q_at(c)])
            self.turn_page(c)
            self.end(s, c)
            self.finish(g, s, c)
            self.let_pass(s, c, c.last["after"])
            blocks = self.next_task(s, c)
        tk.store_wait()

    @cute.jit
    def let_pass(self, s, c, slots):
        for _ in cutlass.range(slots, unroll=1):
            s.k_pipe.wait(c.k)
            self.release(s.k_pipe, c.k)
            s.v_pipe.wait(c.v)
            self.release(s.v_pipe, c.v)
