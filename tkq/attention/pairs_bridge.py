"""``pairs`` with a bridge: the next task's first S and softmax run over this one's last P @ V."""
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention import forward
from tkq.attention.pairs import PairConfig, PairConsumer, PairForward
from tkq.attention.state import Fields
from tkq.attention.window_consumer import HALF, WindowState
from tkq.attention.window_ranges import LOWER, UPPER


@dataclass(frozen=True)
class BridgedPairs(PairConfig):
    """As ``PairConfig``, with the bridge."""


class BridgedConsumer(PairConsumer):
    @cute.jit
    def run(self, g, s, wg):
        config, kv = self.config, self.config.kv
        c = WindowState(
            att=tk.rt_fl(kv), att_mma=tk.rt(kv, self.tiles.q.dtype), o=tk.rt_fl(self.spec.head_dim_v), max=tk.rv(),
            norm=tk.rv(), correct=tk.rv(), max_scaled=tk.rv(), last_max=tk.rv(), last_norm=tk.rv(),
            task=Fields.new(self.fields), last=Fields.new(self.fields), k=s.k_pipe.ring(), v=s.v_pipe.ring(),
            q=tk.ring(config.q_stages), turns=tk.Turns(config.consumers, wg, enabled=config.turns), wg=wg,
            half=tk.rt_fl(HALF))
        c.turns.start()
        if const_expr(config.cluster > 1):
            if tk.cluster_rank() == 0:  # its empty slot
                s.k_pipe.wait(c.k)
                self.release(s.k_pipe, c.k)
                s.v_pipe.wait(c.v)
                self.release(s.v_pipe, c.v)
        blocks, chained = self.next_task(s, c), Int32(0)
        while blocks > 0:
            if chained == 0:
                self.let_pass(s, c, c.task["before"])
                self.begin(g, s, c)
            tk.zero(c.o)
            self.steps(g, s, c)
            tk.arrive(s.q_empty[self.q_at(c)])
            self.turn_page(c)
            blocks = self.next_task(s, c)
            chained = Int32(0)
            if blocks > 0:
                if c.last["after"] + c.task["before"] == 0:
                    # one of the two products that run at once must be of a whole tile: see cut_of
                    if c.last["cut"] != UPPER or c.task["cut"] != LOWER:
                        chained = Int32(1)
            if chained > 0:
                self.bridge(g, s, c)
            else:
                self.end(s, c)
            self.finish(g, s, c)
            self.let_pass(s, c, c.last["after"])
        tk.store_wait()

    def first(self, g, s, c, seen):
        c.turns.take()  # one for each slot, whatever becomes of it
        self.scores(s, c, seen)
        c.turns.give()
        tk.mma_wait()
        self.release(s.k_pipe, c.k)
        self.first_softmax(g, c, seen)
        self.weights(c, seen)


class BridgedForward(PairForward):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.consumer = BridgedConsumer(spec, config)


def build(spec, config):
    return BridgedForward(spec, config), forward.build(spec, config)[1]
