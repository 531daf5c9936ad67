"""The producer warp of the window kernel: which strip next, its key tiles, and the rows that go through them."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.producer import Producer
from tkq.attention.state import extent, field_names
from tkq.attention.window_ranges import ROWS, TILE, ends_of, first_row, told


def window_fields(spec) -> tuple:
    """What a warpgroup is told: of its rows as in ``field_names``, of its way as in ``told``."""
    return (*field_names(spec), "before", "after", "chained", "cut")


class WindowProducer(Producer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = window_fields(spec)

    @cute.jit
    def run(self, g, s):
        tk.prefetch(g.q, g.k, g.v, *[g.o] * (not self.config.o_direct))
        rings = s.k_pipe.ring(), s.v_pipe.ring(), tk.ring(self.config.q_stages)
        tasks, schedule = g.tasks.begin(g.schedule)
        number = schedule.first()
        strip = tasks.find(number)
        while number < schedule.tasks:
            if strip.low < strip.high:
                number, strip = self.strip(g, s, rings, number, strip)
            else:
                number = schedule.following(number, schedule.fetch())
                strip = tasks.find(number)
        self.close(s, rings[2])

    @cute.jit
    def strip(self, g, s, rings, number, strip):
        """Loads a strip. The next one's number, and that."""
        k_ring, v_ring, q_ring = rings
        e = extent(self.spec, self.config, g, g.tasks.rows_q, g.tasks.rows_k)
        ends, span = ends_of(e, strip, g.tasks.span), g.tasks.span
        bottom, top = ends
        batch = strip.head // g.tasks.heads
        of = batch, strip.head % g.tasks.heads // g.tasks.heads_per_kv
        self.load(s.k, g.k, s.k_pipe, k_ring, of, top - 1)
        segment = strip.high - 1
        self.load_segment(g, s, q_ring, (e, strip, span, ends), segment)
        # The next segment's tasks follow when both warpgroups have begun with this one: then there is room for its Q.
        hindmost = cutlass.min(first_row(strip.tiles[0], 0), first_row(strip.tiles[1], 1)) + segment * span * TILE
        begun = (hindmost + e.rows_k - e.rows_q + ROWS - 1 + e.right) // TILE - 1
        fetched, tile = Int32(0), top - 1
        if tile - bottom < 2:
            fetched = g.schedule.fetch()
        while tile > bottom:
            tile = tile - 1
            self.load(s.k, g.k, s.k_pipe, k_ring, of, tile)
            self.load(s.v, g.v, s.v_pipe, v_ring, of, tile + 1)
            if tile <= begun:
                if segment > strip.low:
                    segment = segment - 1
                    begun = begun - span
                    self.load_segment(g, s, q_ring, (e, strip, span, ends), segment)
            if tile - bottom == 1:
                fetched = g.schedule.fetch()
        # There is no room for the last V yet: time to work the next strip out.
        number = g.schedule.following(number, fetched)
        following = g.tasks.find(number)
        self.load(s.v, g.v, s.v_pipe, v_ring, of, bottom)
        return number, following

    @cute.jit
    def load_segment(self, g, s, ring, of, segment):
        """Each consumer's task and Q tile. Rows that are not there come as zeros."""
        e, strip, span, ends = of
        at = {"batch": strip.head // g.tasks.heads, "head": strip.head % g.tasks.heads}
        for w in cutlass.range(self.config.consumers, unroll=1):
            known = {**at, **told(e, strip, span, ends, segment, w)}
            i = self.acquire_q(s, ring, w)
            self.tell_task(s, i, known)
            tk.load_async(s.q[i], g.q, (at["batch"], at["head"], known["tile"] * self.config.consumers + w, 0),
                          s.q_full[i])
        ring.advance()

    def tell_task(self, s, i, known):
        with cute.arch.elect_one():
            for f, name in enumerate(self.fields):
                s.task[f, i] = Int32(known[name])
            cute.arch.mbarrier_arrive_and_expect_tx(s.q_full[i].ptr, self.tiles.q.bytes)

    @cute.jit
    def close(self, s, q_ring):
        """No more strips."""
        for w in cutlass.range_constexpr(self.config.consumers):
            i = self.acquire_q(s, q_ring, w)
            with cute.arch.elect_one():
                for f in cutlass.range_constexpr(len(self.fields)):
                    s.task[f, i] = Int32(-1 if self.fields[f] == "blocks" else 0)
                cute.arch.mbarrier_arrive(s.q_full[i].ptr)
