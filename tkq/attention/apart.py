"""The roles of the attention kernel for windows, where the consumers' rows are a tile of keys apart (``apart_ranges``)."""
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Uint32, const_expr

import tkq.tile as tk
from tkq.attention.apart_ranges import HALF, row_tile, task_range
from tkq.attention.consumer import Consumer
from tkq.attention.producer import Producer
from tkq.attention.softmax import LEFT, RIGHT
from tkq.attention.state import extent


class ApartProducer(Producer):
    """A task's K(n-1) and Q are loaded before the V(0) of the task at hand, which one consumer leaves out and the other
    reads late: the first has begun the next task by then. So a task's Q is not to wait for all of the one before."""

    @cute.jit
    def run(self, g, s):
        tk.prefetch(g.q, g.k, g.v, *[g.o] * (not self.config.o_direct))
        k_ring, v_ring, q_ring = s.k_pipe.ring(), s.v_pipe.ring(), tk.ring(self.config.q_stages)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        self.open(g, s, k_ring, q_ring, tasks, schedule, number)
        while number < schedule.tasks:
            fetched = schedule.fetch()
            t = tasks.find(number)
            r = self.seen(g, t)
            k, v = g.k.rows_from(r.start), g.v.rows_from(r.start)
            of = (t.batch_k, t.head // g.tasks.heads_per_kv)
            for j in cutlass.range(1, r.blocks, unroll=1):
                self.load(s.k, k, s.k_pipe, k_ring, of, r.blocks - 1 - j)
                self.load(s.v, v, s.v_pipe, v_ring, of, r.blocks - j)
            number = schedule.following(number, fetched)
            self.open(g, s, k_ring, q_ring, tasks, schedule, number)
            self.load(s.v, v, s.v_pipe, v_ring, of, 0)
        self.close(s, q_ring)

    @cute.jit
    def open(self, g, s, k_ring, q_ring, tasks, schedule, number):
        """The first loads of a task, if there is one of that number."""
        if number < schedule.tasks:
            t = tasks.find(number)
            r = self.seen(g, t)
            of = (t.batch_k, t.head // g.tasks.heads_per_kv)
            self.load(s.k, g.k.rows_from(r.start), s.k_pipe, k_ring, of, r.blocks - 1)
            self.load_q(g, s, q_ring, t, r)

    def seen(self, g, t):
        return task_range(extent(self.spec, self.config, g, t.rows_q, t.rows_k), t.tile)

    def told(self, t, seen, tile, w):
        mine = row_tile(tile, w)
        return {**t._asdict(), "tile": mine, **vars(seen.visits[w])}, mine


class ApartConsumer(Consumer):
    """A visit begins with half a block. What the other consumer alone visits is waited for and released. Both take as
    many turns."""

    @cute.jit
    def begin(self, g, s, c):
        self.skip(s.k_pipe, c.k, c.task["before"])
        Consumer.begin(self, g, s, c)
        self.skip(s.v_pipe, c.v, c.task["before"])

    def first_part(self, c):
        return replace(c, att=tk.columns(c.att, 0, HALF), att_mma=tk.columns(c.att_mma, 0, HALF))

    def take_first(self, c, part):
        tk.copy(part.att_mma, part.att)
        tk.zero(tk.columns(c.att_mma, HALF, HALF))

    @cute.jit
    def steps(self, g, s, c):
        blocks, masked = c.task["blocks"], c.task["masked"]
        whole = blocks - c.task["masked_left"]
        done = masked
        if masked == 1 and whole > 1:  # as all but a sequence's first and last tasks
            self.step(g, s, c, 1, 0, (0, HALF))
            done = masked + 1
        for i in cutlass.range(1, masked, unroll=1):
            self.step(g, s, c, i, RIGHT | LEFT)
        if const_expr(self.config.o_over_q):
            if c.q.count[0] > 0:  # the O of the task before has left its Q tile
                tk.store_wait()
                tk.arrive(s.q_empty[self.o_at(c)])
        for i in cutlass.range(done, whole, unroll=1):
            self.step(g, s, c, i, 0)
        for i in cutlass.range(whole, blocks, unroll=1):
            self.step(g, s, c, i, LEFT)
        self.skip(s.k_pipe, c.k, c.task["behind"])
        if const_expr(self.config.turns):
            if c.task["pause"] > 0:
                c.turns.take()
                c.turns.give()

    @cute.jit
    def bridge(self, g, s, c):
        self.skip(s.k_pipe, c.k, c.task["before"])
        Consumer.bridge(self, g, s, c)
        self.skip(s.v_pipe, c.v, c.last["behind"])
        self.skip(s.v_pipe, c.v, c.task["before"])

    @cute.jit
    def end(self, s, c):
        Consumer.end(self, s, c)
        self.skip(s.v_pipe, c.v, c.last["behind"])

    @cute.jit
    def skip(self, pipe, ring, blocks):
        """Leave out the next block, if ``blocks`` is 1 and not 0."""
        if blocks > 0:
            pipe.wait(ring)
            pipe.release(ring)
        ring.count[0] = ring.count[0] + Uint32(blocks)

    def o_at(self, c):
        """With ``o_over_q``: the Q tile before the one at hand."""
        return (1 - c.q.stage) * self.config.consumers + c.wg if self.config.o_over_q else c.wg

    def row_tile(self, c):
        return c.last["tile"]
