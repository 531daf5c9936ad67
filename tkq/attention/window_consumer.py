"""A consumer warpgroup of the window kernel: 64 rows of Q after 64 others, and the key tiles that pass by."""
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.consumer import Consumer
from tkq.attention.softmax import LEFT, RIGHT, Softmax
from tkq.attention.state import Fields, State
from tkq.attention.window_producer import window_fields
from tkq.attention.window_ranges import LOWER, UPPER

HALF = 64  # keys
BOTH = (0, 2 * HALF)
KEYS = {LOWER: (0, HALF), UPPER: (HALF, 2 * HALF)}  # of a tile


class HalfSoftmax(Softmax):
    """Of scores of one half of a tile's keys, from key ``start`` on."""

    def __init__(self, spec, config, start):
        super().__init__(spec, config)
        self.start = start

    def limits(self, g, c, i):
        return [None if x is None else x - self.start for x in super().limits(g, c, i)]


@dataclass(frozen=True)
class WindowState(State):
    half: tk.RegTile  # scores of half a tile's keys

    def of_half(self):
        """The same registers, for a softmax of the half."""
        return replace(self, att=self.half)


class WindowConsumer(Consumer):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = window_fields(spec)
        self.half_softmax = {half: HalfSoftmax(spec, config, KEYS[half][0]) for half in KEYS}

    @cute.jit
    def run(self, g, s, wg):
        config, kv = self.config, self.config.kv
        c = WindowState(
            att=tk.rt_fl(kv), att_mma=tk.rt(kv, self.tiles.q.dtype), o=tk.rt_fl(self.spec.head_dim_v), max=tk.rv(),
            norm=tk.rv(), correct=tk.rv(), max_scaled=tk.rv(), last_max=tk.rv(), last_norm=tk.rv(),
            task=Fields.new(self.fields), last=Fields.new(self.fields), k=s.k_pipe.ring(), v=s.v_pipe.ring(),
            q=tk.ring(config.q_stages), turns=tk.Turns(config.consumers, wg, enabled=False), wg=wg,
            half=tk.rt_fl(HALF))
        blocks, chained = Int32(0), Int32(0)  # of the rows at hand; their first S is done
        while blocks >= 0:
            if chained == 0:
                blocks = self.next_task(s, c)
                self.let_pass(s, c, c.task["before"])
                if blocks > 0:
                    self.begin(g, s, c)
                elif blocks == 0:  # no rows
                    tk.arrive(s.q_empty[self.q_at(c)])
                    self.let_pass(s, c, c.task["after"])
                    c.q.advance()
            if blocks > 0:
                tk.zero(c.o)
                self.steps(g, s, c)
                if const_expr(not config.o_over_q):
                    tk.arrive(s.q_empty[self.q_at(c)])
                self.turn_page(c)
                if const_expr(config.bridge):
                    chained = c.last["chained"]
                    if chained > 0:
                        blocks = self.next_task(s, c)
                        self.bridge(g, s, c)
                    else:
                        self.end(s, c)
                else:
                    self.end(s, c)
                self.finish(g, s, c)
                self.let_pass(s, c, c.last["after"])
        tk.store_wait()

    @cute.jit
    def let_pass(self, s, c, tiles):
        """Key tiles that none of the rows sees."""
        for _ in cutlass.range(tiles, unroll=1):
            s.k_pipe.wait(c.k)
            self.release(s.k_pipe, c.k)
            s.v_pipe.wait(c.v)
            self.release(s.v_pipe, c.v)

    # ---- tiles, and halves of tiles: ``seen`` is BOTH, LOWER or UPPER ------------------------------

    @cute.jit
    def begin(self, g, s, c):
        s.k_pipe.wait(c.k)
        if const_expr(self.config.halves):
            if c.task["cut"] == LOWER:
                self.first(g, s, c, LOWER)
            else:
                self.first(g, s, c, BOTH)
        else:
            self.first(g, s, c, BOTH)

    def first(self, g, s, c, seen):
        self.scores(s, c, seen)
        tk.mma_wait()
        self.release(s.k_pipe, c.k)
        self.first_softmax(g, c, seen)
        self.weights(c, seen)

    @cute.jit
    def steps(self, g, s, c):
        blocks, masked = c.task["blocks"], c.task["masked"]
        whole, end = blocks - c.task["masked_left"], blocks
        for i in cutlass.range(1, masked, unroll=1):
            self.tile(g, s, c, i, RIGHT | LEFT, BOTH)
        if const_expr(self.config.halves):
            if c.task["cut"] == LOWER:
                self.tile(g, s, c, masked, 0, BOTH, before=LOWER)
                masked = masked + 1
            if c.task["cut"] == UPPER:
                end = end - 1
        for i in cutlass.range(masked, whole, unroll=1):
            self.tile(g, s, c, i, 0, BOTH)
        for i in cutlass.range(whole, end, unroll=1):
            self.tile(g, s, c, i, LEFT, BOTH)
        if const_expr(self.config.halves):
            if end < blocks:
                self.tile(g, s, c, end, LEFT, UPPER)

    def tile(self, g, s, c, i, sides, seen, before=BOTH):
        """The i-th tile of the visit; before: what was seen of the tile before."""
        self.pair(s, c, seen, before)
        if seen is BOTH:
            self.softmax.step(g, c, i, sides)
        else:
            self.half_softmax[seen].step(g, c.of_half(), i, sides)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        self.weights(c, seen)
        self.correct(c, late=False)

    def pair(self, s, c, seen, before):
        """The next S, and O += P @ V of the tile before; wait for S."""
        s.k_pipe.wait(c.k)
        self.scores(s, c, seen)
        self.correct(c, late=True)
        s.v_pipe.wait(c.v)
        self.sum(s, c, before)
        tk.mma_wait(1)
        self.release(s.k_pipe, c.k)

    @cute.jit
    def bridge(self, g, s, c):
        """The next rows' first S and softmax, over the last P @ V of these."""
        if const_expr(self.config.halves):
            if c.task["cut"] == LOWER:
                self.cross(g, s, c, LOWER, BOTH)
            elif c.last["cut"] == UPPER:
                self.cross(g, s, c, BOTH, UPPER)
            else:
                self.cross(g, s, c, BOTH, BOTH)
        else:
            self.cross(g, s, c, BOTH, BOTH)

    def cross(self, g, s, c, seen, before):
        self.pair(s, c, seen, before)
        self.keep_statistics(c)
        self.first_softmax(g, c, seen)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        self.weights(c, seen)

    @cute.jit
    def end(self, s, c):
        """The last P @ V."""
        self.correct(c, late=True)
        s.v_pipe.wait(c.v)
        if const_expr(self.config.halves):
            if c.last["cut"] == UPPER:
                self.sum(s, c, UPPER)
            else:
                self.sum(s, c, BOTH)
        else:
            self.sum(s, c, BOTH)
        self.keep_statistics(c)
        tk.mma_wait()
        self.release(s.v_pipe, c.v)

    def scores(self, s, c, seen):
        """S = Q @ K.T"""
        q, k = s.q[self.q_at(c)], s.k[c.k.stage]
        if seen is BOTH:
            tk.mm_ABt(c.att, q, k)
        else:
            tk.mm_ABt(c.half, q, k, b_part=KEYS[seen][0] // HALF)

    def sum(self, s, c, seen):
        """O += P @ V"""
        tk.mma_AB(c.o, c.att_mma, s.v[c.v.stage], k=seen if seen is BOTH else KEYS[seen])

    def first_softmax(self, g, c, seen):
        if seen is BOTH:
            self.softmax.first(g, c)
        else:
            self.half_softmax[seen].first(g, c.of_half())

    def weights(self, c, seen):
        """P, as the tensor cores take it."""
        if seen is BOTH:
            tk.copy(c.att_mma, c.att)
        else:
            tk.copy(tk.columns(c.att_mma, KEYS[seen][0], HALF), c.half)
