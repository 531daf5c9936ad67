"""A consumer warpgroup of the window kernel: 64 rows of Q, the key tiles that they see, and halves of such tiles."""
from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute

from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.consumer import Consumer
from tkq.attention.halves_producer import fields_of
from tkq.attention.halves_ranges import LOWER, TILE, UPPER
from tkq.attention.softmax import LEFT, RIGHT, Softmax
from tkq.attention.state import State

HALF = TILE // 2
BOTH = (0, TILE)
KEYS = {LOWER: (0, HALF), UPPER: (HALF, TILE)}  # of a tile


class EagerSoftmax(Softmax):
    def step(self, g, c, i, sides):
        n = self.config.eager
        if not n:
            return super().step(g, c, i, sides)
        self.scores(g, c, i, sides)
        guarded = bool(sides & RIGHT)
        eager, first, rest = tk.rt_fl(n), tk.columns(c.att, 0, n), tk.columns(c.att, n, c.att.cols - n)
        self.find_shift(c, guarded)
        self.into(g, c, eager, first)
        moved = self.out_of_range(g, c)
        self.again_if(g, c, moved, guarded, eager, first)
        self.into(g, c, rest, rest)
        tk.copy(first, eager)
        tk.row_sum_partial(c.norm, c.att, c.norm)
        return moved

    @cute.jit
    def again_if(self, g, c, moved, guarded: cutlass.Constexpr[bool], eager, first):
        if moved:
            self.move(g, c, guarded)
            self.find_shift(c, guarded)
            self.into(g, c, eager, first)

    def into(self, g, c, to, att):
        tk.mul(to, att, g.scale)  # one FFMA with the next line
        tk.sub_row(to, to, c.shift)
        tk.exp2(to, to)


class HalfSoftmax(EagerSoftmax):
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
        self.softmax = EagerSoftmax(spec, config)
        self.half_softmax = {half: HalfSoftmax(spec, config, KEYS[half][0]) for half in KEYS}

    def state(self, s, wg):
        all_of = super().state(s, wg)
        return HalvesState(**{f.name: getattr(all_of, f.name) for f in fields(all_of)}, half=tk.rt_fl(HALF))

    @cute.jit
    def run(self, g, s, wg):
        if const_expr(self.config.bridge):
            self.run_bridge(g, s, wg)
        else:
            super().run(g, s, wg)

    @cute.jit
    def run_bridge(self, g, s, wg):
        c = self.state(s, wg)
        c.turns.start()
        blocks = self.next_task(s, c)
        self.begin(g, s, c)
        tk.zero(c.o)
        done = Int32(1)
        while blocks > 0:
            self.steps_from(g, s, c, done)
            tk.arrive(s.q_empty[self.q_at(c)])
            self.turn_page(c)
            blocks = self.next_task(s, c)
            if blocks > 0:
                done = self.bridge(g, s, c)
            else:
                self.end(s, c)
                super().finish(g, s, c)
                self.let_pass(s, c, c.last["after"])
        tk.store_wait()

    @cute.jit
    def bridge(self, g, s, c):
        """The next task's first S, and behind it this one's last P @ V, which the softmax runs under."""
        passing = c.last["after"] + c.task["before"]
        self.pass_keys(s, c, passing)
        s.k_pipe.wait(c.k)
        c.turns.take()
        if c.task["cut"] == LOWER:
            self.bridge_to(g, s, c, LOWER)
        else:
            self.bridge_to(g, s, c, BOTH)
        done = Int32(1)
        if const_expr(self.config.second):
            if (c.task["masked"] == 1) & (c.task["blocks"] - c.task["masked_left"] > 1):
                self.second_step(g, s, c, passing)
                done = Int32(2)
            else:
                super().finish(g, s, c)
                self.pass_values(s, c, passing)
                tk.zero(c.o)
        else:
            super().finish(g, s, c)
            self.pass_values(s, c, passing)
            tk.zero(c.o)
        return done

    @cute.jit
    def second_step(self, g, s, c, passing):
        s.k_pipe.wait(c.k)
        self.scores(s, c, BOTH)
        super().finish(g, s, c)
        self.pass_values(s, c, passing)
        tk.zero(c.o)
        s.v_pipe.wait(c.v)
        c.turns.take()
        if c.task["cut"] == LOWER:
            self.sum(s, c, LOWER)
        else:
            self.sum(s, c, BOTH)
        c.turns.give()
        tk.mma_wait(1)
        self.release(s.k_pipe, c.k)
        moved = self.softmax.step(g, c, 1, 0)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        self.weights(c, BOTH)
        self.correct_if(c, moved)

    @cute.jit
    def bridge_to(self, g, s, c, seen: cutlass.Constexpr):
        self.scores(s, c, seen)
        self.last_sum(s, c)
        c.turns.give()
        tk.mma_wait(1)
        self.release(s.k_pipe, c.k)
        self.keep_statistics(c)
        self.softmax_of(c, seen, lambda softmax, c: softmax.first(g, c))
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        self.weights(c, seen)

    @cute.jit
    def pass_keys(self, s, c, tiles):
        for _ in cutlass.range(tiles, unroll=1):
            c.turns.take()
            c.turns.give()
            s.k_pipe.wait(c.k)
            self.release(s.k_pipe, c.k)

    @cute.jit
    def pass_values(self, s, c, tiles):
        for _ in cutlass.range(tiles, unroll=1):
            s.v_pipe.wait(c.v)
            self.release(s.v_pipe, c.v)

    @cute.jit
    def last_sum(self, s, c):
        s.v_pipe.wait(c.v)
        if c.last["cut"] == UPPER:
            self.sum(s, c, UPPER)
        else:
            self.sum(s, c, BOTH)

    @cute.jit
    def begin(self, g, s, c):
        self.let_pass(s, c, c.task["before"])
        s.k_pipe.wait(c.k)
        if const_expr(self.config.bridge):
            self.first(g, s, c, BOTH)
        elif c.task["cut"] == LOWER:
            self.first(g, s, c, LOWER)
        else:
            self.first(g, s, c, BOTH)

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

    def first(self, g, s, c, seen):
        """The first S and its softmax."""
        self.scores(s, c, seen)
        tk.mma_wait()
        self.release(s.k_pipe, c.k)
        self.softmax_of(c, seen, lambda softmax, c: softmax.first(g, c))
        self.weights(c, seen)

    def steps(self, g, s, c):
        self.steps_from(g, s, c, Int32(1))

    @cute.jit
    def steps_from(self, g, s, c, done):
        blocks, masked = c.task["blocks"], c.task["masked"]
        whole, end = blocks - c.task["masked_left"], blocks
        for i in cutlass.range(1, masked, unroll=1):
            self.tile(g, s, c, i, RIGHT | LEFT, BOTH)
        if const_expr(not self.config.second):
            if c.task["cut"] == LOWER:
                self.tile(g, s, c, masked, 0, BOTH, before=LOWER)
                masked = masked + 1
        else:
            masked = cutlass.max(masked, done)
        if c.task["cut"] == UPPER:
            end = end - 1
        for i in cutlass.range(masked, whole, unroll=1):
            self.tile(g, s, c, i, 0, BOTH)
        for i in cutlass.range(whole, end, unroll=1):
            self.tile(g, s, c, i, LEFT, BOTH)
        if end < blocks:
            self.tile(g, s, c, end, LEFT, UPPER)

    def tile(self, g, s, c, i, sides, seen, before=BOTH):
        """The i-th tile of the visit; before: what was seen of the tile before."""
        self.pair(s, c, seen, before)
        moved = self.softmax_of(c, seen, lambda softmax, c: softmax.step(g, c, i, sides))
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        self.weights(c, seen)
        self.correct_if(c, moved)

    def pair(self, s, c, seen, before):
        """The next S, and O += P @ V of the tile before; wait for S."""
        s.k_pipe.wait(c.k)
        c.turns.take()
        self.scores(s, c, seen)
        s.v_pipe.wait(c.v)
        self.sum(s, c, before)
        c.turns.give()
        tk.mma_wait(1)
        self.release(s.k_pipe, c.k)

    @cute.jit
    def end(self, s, c):
        s.v_pipe.wait(c.v)
        if c.last["cut"] == UPPER:
            self.sum(s, c, UPPER)
        else:
            self.sum(s, c, BOTH)
        self.keep_statistics(c)
        tk.mma_wait()
        self.release(s.v_pipe, c.v)

    def finish(self, g, s, c):
        super().finish(g, s, c)
        self.let_pass(s, c, c.last["after"])

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

    def softmax_of(self, c, seen, do):
        """do(softmax, state), of the scores of a tile or of half of it."""
        return do(self.softmax, c) if seen is BOTH else do(self.half_softmax[seen], c.of_half())

    def weights(self, c, seen):
        """P, as the tensor cores take it."""
        if seen is BOTH:
            tk.copy(c.att_mma, c.att)
        else:
            tk.copy(tk.columns(c.att_mma, KEYS[seen][0], HALF), c.half)
