"""A chunk's pairs of a query and a key, used for both: the part of `LinearAttention` that gives keys something."""
from functools import partial

import tkq.tile as tk
from tkq.linear_attention.engine.dots import add_dots, write_dots
from tkq.linear_attention.engine.neighbours import Neighbours
from tkq.linear_attention.outputs import put


class BothWays:
    """Two launches of gradients have the same pairs: one with a second query (see `second.Second`), where queries get
    something from the keys before them, and one with a second key and value, from the last token to the first, where
    the keys of the first, as queries, get something from what were its queries. Of a chunk the scores of one are those
    of the other, transposed. The first launch uses them both ways: with x for V where keys get something, it writes in
    the place of its second outputs O2

        P' X - P2' V - O2

    and the other launch, without scores, adds what other chunks give. Its sums of o times x have O2 times v and
    (P' X - P2' V) times v taken off. All that a chunk's pairs add to these is 0, whatever rounding makes of P: what a
    query gets and what a key gets is of the same number of 16 bits. So P and P2 are in one part, and there is room for
    two stages."""

    def __init__(self, groups: int, neighbours: Neighbours, barrier: int):
        """groups: of the state. barrier: the first of theirs."""
        self.groups, self.neighbours, self.barrier = groups, neighbours, barrier

    def write(self, g, s, t, c, at):
        """What comes out of a chunk. c.w is -O2, with P2 negative, and then what is written. at: (the warpgroup, the
        chunk, stages of tokens and scores, None, the ring of outputs)."""
        wg, chunk, stage, scores, _, written = at
        tile, at = stage * self.groups + wg, (wg, written)
        place = t.batch, self.neighbours.head(t), chunk, t.part
        to_o, to_keys = (partial(self.put, to, s, place, wg) for to in (g.o, g.dv))
        tk.load_T(c.x, s.x[tile])
        add_dots(s.dots, c.o, c.x, wg)
        tk.load_T(c.v, s.v[tile])
        # once for itself, once as it is in what is written
        add_dots(s.dots, c.w, c.v, wg, times=2.0)
        tk.mma_AtB(c.w, s.x[tile], s.p[scores])
        tk.mma_AtB(c.w, s.v[tile], s.second.p[scores])
        self.neighbours.give(s, t, c.o, at)
        tk.mma_wait(0)
        self.neighbours.put(s, t, c.o, c.x, at, to_o, True)
        self.neighbours.give(s, t, c.w, at)
        tk.load_T(c.v, s.v[tile])
        add_dots(s.dots, c.w, c.v, wg, times=-1.0)
        write_dots(g, s.dots, t, chunk, (wg, self.barrier + wg))
        self.neighbours.put(s, t, c.w, c.v, at, to_keys, False)
        tk.sync(self.barrier + wg, tk.WARPGROUP)  # sums have been read

    def put(self, to, s, place, wg, x):
        """x to global memory."""
        put(to, s.o, x, place, self.barrier, wg)
