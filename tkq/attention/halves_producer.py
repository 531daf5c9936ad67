"""The producer warp of the window kernel: tells each consumer what its own 64 rows see."""
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.halves_ranges import ROWS, first_key, from_key, told
from tkq.attention.producer import Producer
from tkq.attention.ranges import key_range
from tkq.attention.state import extent, field_names


def fields_of(spec) -> tuple:
    """What a consumer is told of a task: as ``field_names``, of its own rows; and ``halves_ranges.told``'s."""
    return (*field_names(spec), "before", "after", "cut")


class HalvesProducer(Producer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = fields_of(spec)

    def extent(self, g, t):
        """(the extent of a task with keys counted from where its tiles begin, that key)"""
        e = extent(self.spec, self.config, g, t.rows_q, t.rows_k)
        first = first_key(e, t.tile * e.tile_rows) if self.config.anywhere else 0
        return from_key(e, first), first

    def seen(self, g, t):
        e, _ = self.extent(g, t)
        return key_range(e, t.tile * e.tile_rows)

    def keys(self, g, t):
        if not self.config.anywhere:
            return super().keys(g, t)
        _, first = self.extent(g, t)
        return (g.k.rows_from(first), (t.batch_k,)), (g.v.rows_from(first), (t.batch_k,))

    def load_q(self, g, s, ring, t, seen):
        """Each consumer's Q tile, and the task with it."""
        e, _ = self.extent(g, t)
        for w in range(self.config.consumers):
            known = {**t._asdict(), **told(e, seen, t.tile * e.tile_rows + w * ROWS)}
            i = self.acquire_q(s, ring, w)
            with cute.arch.elect_one():
                for f, name in enumerate(self.fields):
                    s.task[f, i] = Int32(known[name])
                cute.arch.mbarrier_arrive_and_expect_tx(s.q_full[i].ptr, self.tiles.q.bytes)
            tk.load_async(s.q[i], g.q, (t.batch, t.head, t.tile * self.config.consumers + w, 0), s.q_full[i])
        ring.advance()
