"""The scheduler warp: it looks the next task up in the block lists while the producer loads the tiles of this one."""
from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.tile_order import even_l2_section, heads_in_l2_section

AHEAD = 2  # tiles before a task's last one the next is asked for: the look takes the time of one or two
MANY = 8  # tasks of each block: a look at the lists is a small part of their time


class FlexTask(NamedTuple):
    """As it travels to the producer. blocks: tiles of keys, 1 or more, or 0: all is done. masked: those of them that
    need the mask, which come first; -1: there is one tile, of which no key is seen. first: the first one's number."""

    batch: Any
    head: Any
    tile: Any
    kv_head: Any
    blocks: Any
    masked: Any
    first: Any


class FlexSchedulerWarp:
    """A task's counts and its first number are two loads in a row, and which task it is takes four divisions: in the
    producer's way they would come between a task's last V and the next one's first K."""

    def __init__(self, spec, config):
        self.spec, self.config = spec, config

    @cute.jit
    def run(self, g, mail):
        """mail: its slot is free when the producer is near the end of the task that it took from it."""
        ring = mail.ring()
        tasks, schedule = g.tasks.begin(g.schedule)
        if const_expr(self.spec.blocks):
            tasks = replace(tasks, l2_section=self.l2_section(g, schedule))
        number = schedule.first()
        while number < schedule.tasks:
            t = tasks.find(number)
            of = t.batch, t.head, t.tile
            counts = g.keys.counts(*of)
            masked = counts.masked
            if counts.all == 0:
                masked = Int32(-1)
            mail.post(ring, *of, t.head // g.tasks.heads_per_kv, cutlass.max(counts.all, 1), masked,
                      g.keys.at(*of, Int32(0), counts))
            tk.wait(mail.empty[ring.stage], ring.phase ^ 1)  # not asked for earlier: the blocks end together
            number = schedule.following(number, schedule.fetch())
        mail.post(ring, *[Int32(0)] * len(FlexTask._fields))

    @cute.jit
    def l2_section(self, g, schedule):
        """Heads that are worked on together, as many as the keys let that their longest tasks visit: so those of short
        tasks end together. Of few tasks those that all keys let, without a look at the lists. A whole warp."""
        section, of = g.tasks.l2_section, g.tasks
        if schedule.tasks > MANY * schedule.workers():
            counts = g.keys.counts(Int32(0), Int32(0), tk.lane_id() * of.tiles // 32)  # of some tiles of one head
            most = Int32(cute.arch.warp_redux_sync(cutlass.max(cutlass.min(counts.all, 1 << 13), 1), "max"))
            bytes_of = most * (self.config.kv * 4 * self.spec.head_dim)
            section = heads_in_l2_section(bytes_of, self.config.l2_section_mb << 20, of.heads_per_kv, of.all_heads)
            section = even_l2_section(section, of.heads_per_kv, of.all_heads)
        return section
