"""Helper warps of dq_reduce "ordered" that wait for a tile's semaphore: each has every DQ_SENDERS-th tile."""
import cutlass.cute as cute

import tkq.tile as tk
from tkq.attention.backward.config import DQ_SENDERS


class DqSenders:
    """send_tile: takes (g, s, task, query head, number of the tile in it, ring of senders, this warp's place in it)."""

    def __init__(self, scheduler, send_tile):
        self.scheduler, self.send_tile = scheduler, send_tile

    @cute.jit
    def run(self, g, s):
        """A warp of the first warpgroup but the producer: all its tiles, if it is a sender."""
        sender = tk.warp_id() - 1
        if sender < DQ_SENDERS:
            turn = tk.ring(DQ_SENDERS)
            cute.arch.griddepcontrol_wait()  # the words are zero
            self.scheduler.each_task(g, s, lambda t, _: self.scheduler.each_tile(
                g, t, lambda _, h, m: self.send_in_turn(g, s, t, h, m, turn, sender)))

    @cute.jit
    def send_in_turn(self, g, s, t, h, m, turn, sender):
        if turn.stage == sender:
            self.send_tile(g, s, t, self.scheduler.query_head(g, t, h), m, turn, sender)
        turn.advance()
