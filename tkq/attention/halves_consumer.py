"""A consumer warpgroup of the window kernel: 64 rows of Q, the key tiles that they see, and halves of such tiles."""
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.consumer import Consumer
from tkq.attention.halves_producer import fields_of
from tkq.attention.halves_ranges import LOWER, TILE, UPPER
from tkq.attention.softmax import LEFT, RIGHT, Softmax
from tkq.attention.state import Fields, State

HALF = TILE // 2
BOTH = (0, TILE)
KEYS = {LOWER: (0, HALF), UPPER: (HALF, TILE)}  # of a tile


class HalfSoftmax(Softmax):
    """Of scores of one half of a tile's keys, from key ``start`` on."""

    def __init__(self, spec, config, start):
        super().__init__(spec, config)
        self.start = start

    def limits(self, g, c, i):
        return [None if x is None else x - self.start for x in super().limits(g, c, i)]


@dataclass(frozen=True)
class HalvesState(State):
    half: tk.RegTile  # scores of half a tile's keys

    def of_half(self):
        """The same registers, for a softmax of the half."""
        return replace(self, att=self.half)


class HalvesConsumer(Consumer):
    """``Consumer``, but tiles that its rows do not see it lets pass, and halves it leaves out: ``seen`` is BOTH, LOWER
    or UPPER."""

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = fields_of(spec)
        self.half_softmax = {half: HalfSoftmax(spec, config, KEYS[half][0]) for half in KEYS}

    @cute.jit
    def run(self, g, s, wg):
        config, kv = self.config, self.config.kv
        c = HalvesState(
            att=tk.rt_fl(kv), att_mma=tk.rt(kv, self.tiles.q.dtype), o=tk.rt_fl(self.spec.head_dim_v), max=tk.rv(),
            norm=tk.rv(), correct=tk.rv(), max_scaled=tk.rv(), last_max=tk.rv(), last_norm=tk.rv(),
            task=Fields.new(self.fields), last=Fields.new(self.fields), k=s.k_pipe.ring(), v=s.v_pipe.ring(),
            q=tk.ring(config.q_stages), turns=tk.Turns(config.consumers, wg, enabled=config.turns), wg=wg,
            half=tk.rt_fl(HALF))
        c.turns.start()
        blocks, bridged = self.next_task(s, c), Int32(0)  # bridged: the first S of the task at hand is done
        while blocks > 0:
            start = Int32(1)
            if bridged == 0:
                self.let_pass(s, c, c.task["before"])
                self.begin(g, s, c)
                tk.zero(c.o)
            elif const_expr(config.bridge and config.ahead):
                start = self.finish_under_second(g, s, c)
            else:
                tk.zero(c.o)
            self.steps(g, s, c, start)
            tk.arrive(s.q_empty[self.q_at(c)])
            self.turn_page(c)
            if const_expr(config.bridge):
                blocks = self.next_task(s, c)
                bridged = self.may_bridge(c, blocks)
                if bridged > 0:
                    self.bridge(g, s, c)
                    if const_expr(not config.ahead):
                        self.finish(g, s, c)
                else:
                    self.end(s, c)
                    self.finish(g, s, c)
                    self.let_pass(s, c, c.last["after"])
            elif const_expr(config.ahead):
                self.end(s, c)
                self.let_pass(s, c, c.last["after"])
                blocks = self.next_task(s, c)
                self.finish_under_first(g, s, c, blocks)
                bridged = Int32(1)
            else:
                self.end(s, c)
                self.finish(g, s, c)
                self.let_pass(s, c, c.last["after"])
                blocks = self.next_task(s, c)
        tk.store_wait()

    @cute.jit
    def let_pass(self, s, c, tiles):
        """Key tiles that none of the rows sees. A turn for each: both consumers take as many."""
        for _ in cutlass.range(tiles, unroll=1):
            c.turns.take()
            c.turns.give()
            s.k_pipe.wait(c.k)
            self.release(s.k_pipe, c.k)
            s.v_pipe.wait(c.v)
            self.release(s.v_pipe, c.v)

    @cute.jit
    def may_bridge(self, c, blocks):
        """1 where the next task's first tile follows this one's last, and one of the two products is of a whole one."""
        found = Int32(0)
        if blocks > 0:
            if c.last["after"] + c.task["before"] == 0:
                if c.last["cut"] != UPPER or c.task["cut"] != LOWER:
                    found = Int32(1)
        return found

    @cute.jit
    def begin(self, g, s, c):
        s.k_pipe.wait(c.k)
        if c.task["cut"] == LOWER:
            self.first(g, s, c, LOWER)
        else:
            self.first(g, s, c, BOTH)

    def first(self, g, s, c, seen, meanwhile=None):
        """The first S and its softmax; meanwhile: what is done while S is computed."""
        if self.config.bridge:  # as many turns as tiles, whether one consumer crosses the bridge or both
            c.turns.take()
        self.scores(s, c, seen)
        if self.config.bridge:
            c.turns.give()
        if meanwhile:
            meanwhile(g, s, c)
        tk.mma_wait()
        self.release(s.k_pipe, c.k)
        self.first_softmax(g, c, seen)
        self.weights(c, seen)

    @cute.jit
    def finish_under_first(self, g, s, c, blocks):
        """Write O of the last task, while the next one's first S is computed."""
        if blocks > 0:
            self.let_pass(s, c, c.task["before"])
            s.k_pipe.wait(c.k)
            if c.task["cut"] == LOWER:
                self.first(g, s, c, LOWER, self.finish)
            else:
                self.first(g, s, c, BOTH, self.finish)
        else:
            self.finish(g, s, c)

    @cute.jit
    def finish_under_second(self, g, s, c):
        """Write O of the last task, while the second S of the one at hand is computed, if that is of a whole tile
        without a mask. The step that comes next."""
        start = Int32(2)
        if c.task["masked"] > 1 or c.task["blocks"] - c.task["masked_left"] < 2:
            self.finish(g, s, c)
            tk.zero(c.o)
            start = Int32(1)
        elif c.task["cut"] == LOWER:
            self.tile(g, s, c, Int32(1), 0, BOTH, LOWER, self.finish)
        else:
            self.tile(g, s, c, Int32(1), 0, BOTH, BOTH, self.finish)
        return start

    @cute.jit
    def steps(self, g, s, c, start):
        """From step ``start`` on: 1, or 2."""
        blocks, masked = c.task["blocks"], c.task["masked"]
        whole, end = blocks - c.task["masked_left"], blocks
        for i in cutlass.range(start, masked, unroll=1):
            self.tile(g, s, c, i, RIGHT | LEFT, BOTH)
        masked = cutlass.max(masked, start)
        if c.task["cut"] == LOWER:
            if start == 1:
                self.tile(g, s, c, masked, 0, BOTH, before=LOWER)
                masked = masked + 1
        if c.task["cut"] == UPPER:
            end = end - 1
        for i in cutlass.range(masked, whole, unroll=1):
            self.tile(g, s, c, i, 0, BOTH)
        for i in cutlass.range(whole, end, unroll=1):
            self.tile(g, s, c, i, LEFT, BOTH)
        if end < blocks:
            self.tile(g, s, c, end, LEFT, UPPER)

    def tile(self, g, s, c, i, sides, seen, before=BOTH, meanwhile=None):
        """The i-th tile of the visit; before: what was seen of the tile before. meanwhile: see ``pair``."""
        self.pair(g, s, c, seen, before, meanwhile)
        if seen is BOTH:
            self.softmax.step(g, c, i, sides)
        else:
            self.half_softmax[seen].step(g, c.of_half(), i, sides)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        self.weights(c, seen)
        self.correct(c, late=False)

    def pair(self, g, s, c, seen, before, meanwhile=None):
        """The next S, and O += P @ V of the tile before; wait for S. meanwhile: what is done with O while S is
        computed; it then begins with this product."""
        s.k_pipe.wait(c.k)
        c.turns.take()
        self.scores(s, c, seen)
        if meanwhile:
            c.turns.give()
            meanwhile(g, s, c)
            tk.zero(c.o)
        else:
            self.correct(c, late=True)
        s.v_pipe.wait(c.v)
        self.sum(s, c, before)
        if not meanwhile:
            c.turns.give()
        tk.mma_wait(1)
        self.release(s.k_pipe, c.k)

    @cute.jit
    def bridge(self, g, s, c):
        """The next task's first S and softmax, over the last P @ V of this one."""
        if c.task["cut"] == LOWER:
            self.cross(g, s, c, LOWER, BOTH)
        elif c.last["cut"] == UPPER:
            self.cross(g, s, c, BOTH, UPPER)
        else:
            self.cross(g, s, c, BOTH, BOTH)

    def cross(self, g, s, c, seen, before):
        self.pair(g, s, c, seen, before)
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
        if c.last["cut"] == UPPER:
            self.sum(s, c, UPPER)
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
