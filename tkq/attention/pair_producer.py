"""The producer warp of a block of a pair: which task next, its tiles of Q, and the key tiles that come to both blocks."""
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.pair_ranges import Way, let_pass, way_of
from tkq.attention.producer import Producer
from tkq.attention.ranges import key_range
from tkq.attention.state import extent, field_names


def pair_fields(spec) -> tuple:
    """What a consumer is told of a task: as ``field_names``, and the slots that it lets pass (``let_pass``)."""
    return (*field_names(spec), "before", "after")


class PairProducer(Producer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = pair_fields(spec)

    @cute.jit
    def run(self, g, s):
        tk.prefetch(g.q, g.k, g.v, g.k_alone, g.v_alone, *[g.o] * (not self.config.o_direct))
        rank, told = tk.cluster_rank(), tk.ring(1)
        if rank == 0:  # its first slot is empty
            tk.arrive(s.k_pipe.full[0])
            tk.arrive(s.v_pipe.full[0])
        k_ring, v_ring = [tk.ring(self.config.stages, 1 - rank) for _ in range(2)]
        keys, values = ((g.k, g.k_alone), s.k, s.k_pipe, k_ring), ((g.v, g.v_alone), s.v, s.v_pipe, v_ring)
        q_ring, schedule = tk.ring(self.config.q_stages), g.schedule
        number = schedule.first()
        while number < schedule.tasks:
            t = g.tasks.find(number)
            seen = [self.seen_by(g, t, i) for i in range(2)]
            way = way_of(*seen, rank)
            of = t.batch_k, t.head // g.tasks.heads_per_kv
            self.load_slot(keys, of, way, Int32(0))
            self.load_rows(g, s, q_ring, t, way, rank)
            # It takes a while until the other block knows the next task: three slots before the end.
            ask, fetched, following = way.slots - 3, Int32(0), number
            for slot in cutlass.range(1, way.slots, unroll=1):
                self.load_slot(keys, of, way, slot)
                self.load_slot(values, of, way, slot - 1)
                if slot == ask:
                    fetched = schedule.fetch()
                if slot == ask + 1:
                    if ask > 0:
                        following = schedule.following(number, fetched, lambda found: self.tell(s, found, told))
            if ask <= 0:
                fetched = schedule.fetch()
                following = schedule.following(number, fetched, lambda found: self.tell(s, found, told))
            self.load_slot(values, of, way, way.slots - 1)
            number = following
        self.close(s, q_ring)

    def seen_by(self, g, t, rank):
        """The key tiles of one block's rows of a task."""
        c = self.config
        e = replace(extent(self.spec, c, g, g.tasks.rows_q, g.tasks.rows_k), tile_rows=c.rows)
        return key_range(e, (t.tile * c.cluster + rank) * c.rows)

    @cute.jit
    def load_slot(self, to, of, way: Way, slot):
        """A tile for both blocks, half of it by each; or this block's own; or nothing."""
        (both, alone), tiles, pipe, ring = to
        full, at = pipe.full[ring.stage], (*of, way.top - slot, 0)
        pipe.acquire_empty(ring)
        if slot != way.alone:
            tk.expect_bytes(full, pipe.bytes)
            tk.load_async(tiles[ring.stage], both, at, full)
        elif way.there > 0:
            tk.expect_bytes(full, pipe.bytes)
            tk.load_async(tiles[ring.stage], alone, at, full)
        else:
            tk.arrive(full)
        ring.advance()

    @cute.jit
    def load_rows(self, g, s, ring, t, way, rank):
        """Each consumer's Q tile, and the task with it."""
        seen, tile = self.seen_by(g, t, rank), t.tile * self.config.cluster + rank
        before, after = let_pass(way, seen)
        known = {**t._asdict(), "tile": tile, **vars(seen), "before": before, "after": after}
        for w in cutlass.range_constexpr(self.config.consumers):
            i = self.acquire_q(s, ring, w)
            with cute.arch.elect_one():
                for f, name in enumerate(self.fields):
                    s.task[f, i] = Int32(known[name])
                cute.arch.mbarrier_arrive_and_expect_tx(s.q_full[i].ptr, self.tiles.q.bytes)
            tk.load_async(s.q[i], g.q, (t.batch, t.head, tile * self.config.consumers + w, 0), s.q_full[i])
        ring.advance()
