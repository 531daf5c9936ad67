"""A consumer warpgroup of the window kernel: 64 rows of Q, the key tiles that they see, and halves of such tiles."""
from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

import tkq.tile as tk
from tkq.attention.consumer import Consumer
from tkq.attention.halves_producer import fields_of
from tkq.attention.halves_ranges import LOWER, ROWS, UPPER, first_key, from_key
from tkq.attention.ranges import limits_in_block
from tkq.attention.softmax import LEFT, RIGHT, Softmax
from tkq.attention.state import State, extent

BOTH = 0


def keys_of(config, seen):
    """(first, end) of a tile's keys."""
    return {BOTH: (0, config.kv), LOWER: (0, config.kv - ROWS), UPPER: (ROWS, config.kv)}[seen]


class PartSoftmax(Softmax):
    """Of scores of a tile's keys from key ``start`` on."""

    def __init__(self, spec, config, start):
        super().__init__(spec, config)
        self.start = start

    def limits(self, g, c, i):
        e = extent(self.spec, self.config, g, *g.tasks.lengths(c.task))
        row = c.task["tile"] * self.config.rows
        if self.config.anywhere:
            e = from_key(e, first_key(e, row))
        block = c.task["first"] + c.task["blocks"] - 1 - i
        return [None if x is None else x - self.start for x in limits_in_block(e, row + c.wg * ROWS, block)]


@dataclass(frozen=True)
class HalvesState(State):
    part: tk.RegTile  # scores of a part of a tile's keys

    def of_part(self):
        """The same registers, for a softmax of the part."""
        return replace(self, att=self.part)


class HalvesConsumer(Consumer):
    """``Consumer``, but tiles that its rows do not see it lets pass, and halves it leaves out: ``seen`` is BOTH, LOWER
    or UPPER."""

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.fields = fields_of(spec)
        self.softmaxes = {seen: PartSoftmax(spec, config, keys_of(config, seen)[0]) for seen in (BOTH, LOWER, UPPER)}

    def state(self, s, wg):
        all_of = super().state(s, wg)
        return HalvesState(**{f.name: getattr(all_of, f.name) for f in fields(all_of)}, part=tk.rt_fl(self.config.kv - ROWS))

    @cute.jit
    def run(self, g, s, wg):
        if const_expr(self.config.ahead):
            self.run_ahead(g, s, wg)
        else:
            super().run(g, s, wg)

    @cute.jit
    def run_ahead(self, g, s, wg):
        c = self.state(s, wg)
        c.turns.start()
        blocks = self.next_task(s, c)
        if blocks > 0:
            self.begin(g, s, c)
        while blocks > 0:
            if const_expr(not self.config.split):
                tk.zero(c.o)
            self.steps(g, s, c)
            tk.arrive(s.q_empty[self.q_at(c)])
            self.turn_page(c)
            blocks = self.next_task(s, c)
            if blocks > 0:
                self.following(g, s, c)
            else:
                self.end(s, c)
                self.finish(g, s, c)
        tk.store_wait()

    @cute.jit
    def following(self, g, s, c):
        """The last P @ V, and behind it the next task's first S; O is written meanwhile."""
        self.last_sum(s, c)
        self.keep_statistics(c)
        passing = c.last["after"] + c.task["before"]
        if passing > 0:
            tk.mma_wait()
            self.release(s.v_pipe, c.v)
            self.let_pass(s, c, passing)
        s.k_pipe.wait(c.k)
        if c.task["cut"] == LOWER:
            self.first_after(g, s, c, LOWER, passing)
        else:
            self.first_after(g, s, c, BOTH, passing)

    @cute.jit
    def first_after(self, g, s, c, seen: cutlass.Constexpr[int], passing):
        self.scores(s, c, seen)
        tk.mma_wait(1)
        if passing == 0:
            self.release(s.v_pipe, c.v)
        super().finish(g, s, c)
        self.after_first(g, s, c, seen)

    @cute.jit
    def begin(self, g, s, c):
        self.let_pass(s, c, c.task["before"])
        s.k_pipe.wait(c.k)
        if c.task["cut"] == LOWER:
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
        self.after_first(g, s, c, seen)

    def after_first(self, g, s, c, seen):
        tk.mma_wait()
        self.release(s.k_pipe, c.k)
        self.softmax_of(c, seen, lambda softmax, c: softmax.first(g, c))
        if not self.config.split:
            self.weights(c, seen)
        elif seen == BOTH:
            self.first_part(g, s, c, tk.mm_AB)
        else:
            self.weights(c, seen)
            s.v_pipe.wait(c.v)
            tk.mm_AB(c.o, c.att_mma, s.v[c.v.stage], k=keys_of(self.config, seen))

    @cute.jit
    def steps(self, g, s, c):
        if const_expr(self.config.one_loop):
            self.steps_of_one_loop(g, s, c)
        else:
            self.steps_of_loops(g, s, c)

    @cute.jit
    def steps_of_one_loop(self, g, s, c):
        blocks, masked = c.task["blocks"], c.task["masked"]
        whole, end = blocks - c.task["masked_left"], blocks
        if c.task["cut"] == UPPER:
            end = end - 1
        for i in cutlass.range(1, end, unroll=1):
            s.k_pipe.wait(c.k)
            c.turns.take()
            self.scores(s, c, BOTH)
            if const_expr(not self.config.split):
                s.v_pipe.wait(c.v)
            if c.task["cut"] == LOWER and i == 1:
                if const_expr(self.config.split):
                    tk.mma_commit()
                else:
                    self.sum(s, c, LOWER)
            elif const_expr(self.config.split):
                self.second_part(s, c)
            else:
                self.sum(s, c, BOTH)
            self.wait_and_give(s, c)
            moved = self.softmaxes[BOTH].step_of(g, c, i, i < masked, i >= whole)
            self.wait_and_correct_if(c, moved)
            tk.mma_wait(0)
            self.release(s.v_pipe, c.v)
            if const_expr(self.config.split):
                self.first_part(g, s, c, tk.mma_AB)
            else:
                self.weights(c, BOTH)
            self.correct_if(c, moved)
        if end < blocks:
            self.tile(g, s, c, end, LEFT, UPPER)

    @cute.jit
    def steps_of_loops(self, g, s, c):
        blocks, masked = c.task["blocks"], c.task["masked"]
        whole, end = blocks - c.task["masked_left"], blocks
        for i in cutlass.range(1, masked, unroll=1):
            self.tile(g, s, c, i, RIGHT | LEFT, BOTH)
        if c.task["cut"] == LOWER:
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

    def tile(self, g, s, c, i, sides, seen, before=BOTH):
        """The i-th tile of the visit; before: what was seen of the tile before."""
        self.pair(s, c, seen, before)
        moved = self.softmax_of(c, seen, lambda softmax, c: softmax.step(g, c, i, sides))
        self.wait_and_correct_if(c, moved)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        if self.config.split and seen == BOTH:
            self.first_part(g, s, c, tk.mma_AB)
        else:
            self.weights(c, seen)
        self.correct_if(c, moved)

    def pair(self, s, c, seen, before):
        """The next S, and O += P @ V of the tile before; wait for S."""
        s.k_pipe.wait(c.k)
        c.turns.take()
        self.scores(s, c, seen)
        if not self.config.split:
            s.v_pipe.wait(c.v)
            self.sum(s, c, before)
        elif before == BOTH:
            self.second_part(s, c)
        self.wait_and_give(s, c, 0 if self.config.split and before == LOWER else 1)

    @cute.jit
    def last_sum(self, s, c):
        s.v_pipe.wait(c.v)
        if c.last["cut"] == UPPER:
            self.sum(s, c, UPPER)
        elif const_expr(self.config.split):
            self.second_part(s, c)
        else:
            self.sum(s, c, BOTH)

    @cute.jit
    def end(self, s, c):
        self.last_sum(s, c)
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
            tk.mm_ABt(c.part, q, k.rows(keys_of(self.config, seen)[0], c.part.cols))

    def sum(self, s, c, seen):
        """O += P @ V"""
        tk.mma_AB(c.o, c.att_mma, s.v[c.v.stage], k=keys_of(self.config, seen))

    def softmax_of(self, c, seen, do):
        """do(softmax, state), of the scores of a tile or of a part of it."""
        return do(self.softmaxes[seen], c if seen is BOTH else c.of_part())

    def weights(self, c, seen):
        """P, as the tensor cores take it."""
        if seen is BOTH:
            tk.copy(c.att_mma, c.att)
        else:
            tk.copy(tk.columns(c.att_mma, keys_of(self.config, seen)[0], c.part.cols), c.part)
