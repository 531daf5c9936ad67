"""The producer warp of the window kernel: tells each consumer what its own 64 rows see."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.halves_ranges import ROWS, told
from tkq.attention.producer import Producer
from tkq.attention.state import extent, field_names


AHEAD = 3  # key tiles before a task's end at which the next one is fetched


def fields_of(spec) -> tuple:
    """What a consumer is told of a task: as ``field_names``, of its own rows; and ``halves_ranges.told``'s."""
    return (*field_names(spec), "before", "after", "cut")


class HalvesProducer(Producer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = fields_of(spec)

    @cute.jit
    def run(self, g, s):
        if const_expr(self.config.scout):
            if tk.warp_id() == 0:
                self.stream(g, s)
            else:
                self.scout(g, s)
        elif const_expr(self.config.early):
            self.run_early(g, s)
        else:
            super().run(g, s)

    @cute.jit
    def scout(self, g, s):
        tk.prefetch(g.q, g.o)
        q_ring, asked = tk.ring(self.config.q_stages), tk.ring(1)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        while number < schedule.tasks:
            t = tasks.find(number)
            seen = self.seen(g, t)
            self.post(s, t.batch_k, t.head // g.tasks.heads_per_kv, seen.first + seen.blocks - 1, seen.blocks)
            self.load_q(g, s, q_ring, t, seen)
            tk.wait(s.asked, asked.phase)
            asked.advance()
            number = schedule.following(number, schedule.fetch())
        self.post(s, 0, 0, 0, 0)
        self.close(s, q_ring)

    def post(self, s, *values):
        with cute.arch.elect_one():
            for f, value in enumerate(values):
                s.posted[f, 0] = Int32(value)
            cute.arch.mbarrier_arrive(s.known.ptr)

    def taken(self, s, known):
        tk.wait(s.known, known.phase)
        known.advance()
        return [cute.arch.make_warp_uniform(s.posted[f, 0]) for f in range(4)]

    @cute.jit
    def stream(self, g, s):
        tk.prefetch(g.k, g.v)
        k_ring, v_ring, known = s.k_pipe.ring(), s.v_pipe.ring(), tk.ring(1)
        batch, head, last, blocks = self.taken(s, known)
        while blocks > 0:
            self.load(s.k, g.k, s.k_pipe, k_ring, (batch, head), last)
            for j in cutlass.range(1, blocks, unroll=1):
                if j == blocks // 2:
                    cute.arch.sync_warp()
                    tk.arrive(s.asked)
                self.load(s.k, g.k, s.k_pipe, k_ring, (batch, head), last - j)
                self.load(s.v, g.v, s.v_pipe, v_ring, (batch, head), last - j + 1)
            if blocks == 1:
                cute.arch.sync_warp()
                tk.arrive(s.asked)
            self.load(s.v, g.v, s.v_pipe, v_ring, (batch, head), last - blocks + 1)
            batch, head, last, blocks = self.taken(s, known)

    @cute.jit
    def run_early(self, g, s):
        """As ``Producer.run``, but a task's Q and first K come before the last V of the task before: consumers need them
        with that one."""
        tk.prefetch(g.q, g.k, g.v, g.o)
        k_ring, v_ring, q_ring = s.k_pipe.ring(), s.v_pipe.ring(), tk.ring(self.config.q_stages)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        self.enter(g, s, tasks.find(number), k_ring, q_ring)
        while number < schedule.tasks:
            t = tasks.find(number)
            seen, of = self.seen(g, t), self.keys_of(g, t)
            end = seen.first + seen.blocks
            fetched = Int32(0)
            if seen.blocks <= AHEAD:
                fetched = schedule.fetch()
            for j in cutlass.range(1, seen.blocks, unroll=1):
                if j == seen.blocks - AHEAD:
                    fetched = schedule.fetch()
                self.load(s.k, g.k, s.k_pipe, k_ring, of, end - 1 - j)
                self.load(s.v, g.v, s.v_pipe, v_ring, of, end - j)
            number = schedule.following(number, fetched)
            if number < schedule.tasks:
                self.enter(g, s, tasks.find(number), k_ring, q_ring)
            self.load(s.v, g.v, s.v_pipe, v_ring, of, seen.first)
        self.close(s, q_ring)

    def enter(self, g, s, t, k_ring, q_ring):
        """A task's Q and its first K."""
        seen = self.seen(g, t)
        self.load_q(g, s, q_ring, t, seen)
        self.load(s.k, g.k, s.k_pipe, k_ring, self.keys_of(g, t), seen.first + seen.blocks - 1)

    def keys_of(self, g, t):
        return t.batch_k, t.head // g.tasks.heads_per_kv

    def load_q(self, g, s, ring, t, seen):
        """Each consumer's Q tile, and the task with it."""
        e = extent(self.spec, self.config, g, t.rows_q, t.rows_k)
        for w in range(self.config.consumers):
            known = {**t._asdict(), **told(e, seen, t.tile * e.tile_rows + w * ROWS)}
            i = self.acquire_q(s, ring, w)
            with cute.arch.elect_one():
                for f, name in enumerate(self.fields):
                    s.task[f, i] = Int32(known[name])
                cute.arch.mbarrier_arrive_and_expect_tx(s.q_full[i].ptr, self.tiles.q.bytes)
            tk.load_async(s.q[i], g.q, (t.batch, t.head, t.tile * self.config.consumers + w, 0), s.q_full[i])
        ring.advance()
