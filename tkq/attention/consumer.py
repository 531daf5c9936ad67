"""A consumer warpgroup of the attention kernel: 64 rows of Q and all that becomes of them."""
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Uint32, const_expr

import tkq.tile as tk
from tkq.attention.ranges import ceil_div, part_of
from tkq.attention.softmax import LEFT, RIGHT, Softmax
from tkq.attention.state import Fields, State, Tiles, clipped, extent, field_names

BEFORE, AFTER, TURNS = range(3)  # of State.pass_by


class Consumer:
    def __init__(self, spec, config):
        self.spec, self.config, self.softmax = spec, config, Softmax(spec, config)
        self.tiles, self.fields = Tiles.of(spec, config), field_names(spec)

    @cute.jit
    def run(self, g, s, wg):
        config, kv, span = self.config, self.config.kv, range(self.config.span)
        c = State(att=tuple(tk.rt_fl(kv) for _ in span), att_mma=tuple(tk.rt(kv, self.tiles.q.dtype) for _ in span),
                  o=tk.rt_fl(self.spec.head_dim_v),
                  max=tk.rv(), norm=tk.rv(), correct=tk.rv(), max_scaled=tk.rv(), last_max=tk.rv(), last_norm=tk.rv(),
                  task=Fields.new(self.fields), last=Fields.new(self.fields),
                  k=s.k_pipe.ring(), v=s.v_pipe.ring(), q=tk.ring(config.q_stages),
                  turns=tk.Turns(config.consumers, wg, enabled=config.turns),
                  pass_by=cute.make_rmem_tensor((3,), Int32), wg=wg)
        c.turns.start()
        blocks = self.next_task(g, s, c)
        if const_expr(config.bridge and not self.spec.varlen):
            self.begin(g, s, c)
        elif const_expr(config.bridge):
            if blocks > 0:  # there may be fewer tasks than blocks: how many is known only here
                self.begin(g, s, c)
        while blocks > 0:
            if const_expr(not config.bridge):
                self.begin(g, s, c)
            tk.zero(c.o)
            self.steps(g, s, c)
            if const_expr(not config.o_over_q):
                tk.arrive(s.q_empty[self.q_at(c)])
            self.turn_page(c)
            if const_expr(config.bridge):
                blocks = self.next_task(g, s, c)
                if blocks > 0:
                    self.bridge(g, s, c)
                else:
                    self.end(s, c)
                self.finish(g, s, c)
            else:
                self.end(s, c)
                self.let_pass(s, c, AFTER, s.k_pipe, s.v_pipe)
                self.finish(g, s, c)
                blocks = self.next_task(g, s, c)
        tk.store_wait()

    def turn_page(self, c):
        """The task at hand becomes the one to be finished."""
        for f in range(len(self.fields)):
            c.last.values[f] = c.task.values[f]
        c.q.advance()

    def q_at(self, c):
        return c.q.stage * self.config.consumers + c.wg

    @cute.jit
    def next_task(self, g, s, c):
        """Wait for the next task's Q, and the task with it. How many blocks it has: none, and all is done."""
        i = self.q_at(c)
        tk.wait(s.q_full[i], c.q.phase)
        for f in cutlass.range_constexpr(len(self.fields)):
            c.task.values[f] = cute.arch.make_warp_uniform(s.task[f, i])
        blocks = c.task["blocks"]
        if const_expr(self.config.own):
            self.own_part(g, c)
        return blocks

    def own_part(self, g, c):
        """Of the task's key blocks those that this consumer's rows see."""
        config, pack, t = self.config, self.spec.pack, c.task
        rows_q, rows_k = g.tasks.lengths(t)
        rows_k = cutlass.max(rows_k, 1) if self.spec.varlen else rows_k  # as the producer has it
        e = replace(extent(self.spec, config, g, rows_q, rows_k), tile_rows=64 // pack)
        row = t["tile"] * (config.rows // pack) + c.wg * (64 // pack)
        part = part_of(e, row, t["first"], t["blocks"], config.span)
        steps = lambda blocks: ceil_div(blocks, config.span)
        c.pass_by[BEFORE], c.pass_by[AFTER] = part.before, part.after
        c.pass_by[TURNS] = steps(t["blocks"]) - steps(part.seen.blocks)
        for name, value in vars(part.seen).items():
            t[name] = value

    @cute.jit
    def let_pass(self, s, c, which: Constexpr[int], *pipes: Constexpr):
        """With ``own``, tiles of K and V that are for others: not released before they are there, as a release counts
        for the stage's present tile."""
        if const_expr(self.config.own):
            for _ in cutlass.range(c.pass_by[which], unroll=1):
                for pipe in pipes:
                    ring = c.k if pipe is s.k_pipe else c.v
                    pipe.wait(ring)
                    self.release(pipe, ring)

    @cute.jit
    def begin(self, g, s, c):
        """A task's first S = Q @ K.T, and its softmax."""
        self.let_pass(s, c, BEFORE, s.k_pipe)
        self.wait(s.k_pipe, c.k, self.config.span)
        self.scores(s, c, self.config.span)
        tk.mma_wait()
        self.release(s.k_pipe, c.k, self.config.span)
        self.softmax.first(g, c)
        self.narrow(c, self.config.span)
        self.let_pass(s, c, BEFORE, s.v_pipe)
        if const_expr(self.config.own and self.config.turns):  # all take as many
            for _ in cutlass.range(c.pass_by[TURNS], unroll=1):
                c.turns.take()
                c.turns.give()

    @cute.jit
    def steps(self, g, s, c):
        """Each further S and softmax, over the P @ V of the block before."""
        if const_expr(self.config.span == 2):
            self.double_steps(g, s, c)
        else:
            self.single_steps(g, s, c)

    @cute.jit
    def single_steps(self, g, s, c):
        blocks, masked = c.task["blocks"], Int32(1)
        if const_expr(self.spec.causal or self.spec.right):
            masked = c.task["masked"]
            for i in cutlass.range(1, masked, unroll=1):
                self.step(g, s, c, i, RIGHT | LEFT)
        whole = blocks
        if const_expr(self.spec.left):
            whole = blocks - c.task["masked_left"]
        for i in cutlass.range(masked, whole, unroll=1):
            self.step(g, s, c, i, 0)
        if const_expr(self.spec.left):
            for i in cutlass.range(whole, blocks, unroll=1):
                self.step(g, s, c, i, LEFT)

    @cute.jit
    def double_steps(self, g, s, c):
        """Two blocks at a time, and one that is left over. 64 rows or fewer: no more than the first two blocks need a
        mask on the right."""
        blocks = c.task["blocks"]
        whole = (blocks - c.task["masked_left"]) // 2
        for i in cutlass.range(1, whole, unroll=1):
            self.step(g, s, c, 2 * i, 0, 2)
        for i in cutlass.range(cutlass.max(whole, 1), blocks // 2, unroll=1):
            self.step(g, s, c, 2 * i, LEFT, 2)
        if blocks % 2 == 1:
            self.step(g, s, c, blocks - 1, LEFT)

    @cute.jit
    def step(self, g, s, c, i, sides: Constexpr[int], n: Constexpr[int] = 1):
        """n blocks of the visit, from the i-th on."""
        self.issue(s, c, n)
        self.softmax.step(g, c, i, sides, n)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v, self.config.span)
        self.narrow(c, n)
        self.correct(c, late=False)

    def issue(self, s, c, n=1):
        """The next S = Q @ K.T, of n blocks, and O += P @ V of those before; wait for S."""
        self.wait(s.k_pipe, c.k, n)
        c.turns.take()
        self.scores(s, c, n)
        self.correct(c, late=True)
        self.wait(s.v_pipe, c.v, self.config.span)
        self.values(s, c, self.config.span)
        c.turns.give()
        tk.mma_wait(self.config.span)
        self.release(s.k_pipe, c.k, n)

    def scores(self, s, c, n):
        """S of n blocks."""
        for i in range(n):
            tk.mm_ABt(c.att[n - 1 - i], s.q[self.q_at(c)], s.k[ahead(c.k, i).stage])

    def values(self, s, c, n):
        """O += P @ V of n blocks."""
        for i in range(n):
            tk.mma_AB(c.o, c.att_mma[n - 1 - i], s.v[ahead(c.v, i).stage])

    def narrow(self, c, n):
        for p, x in zip(c.att_mma[:n], c.att):
            tk.copy(p, x)

    @cute.jit
    def bridge(self, g, s, c):
        """The next task's first S and softmax, over this task's last P @ V."""
        self.issue(s, c)
        self.keep_statistics(c)
        self.softmax.first(g, c)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        self.narrow(c, 1)

    @cute.jit
    def end(self, s, c):
        """The last P @ V."""
        if const_expr(self.config.span == 1):
            self.last_values(s, c, 1)
        elif c.task["blocks"] % 2 == 1:
            self.last_values(s, c, 1)
        else:
            self.last_values(s, c, 2)

    def last_values(self, s, c, n):
        self.correct(c, late=True)
        self.wait(s.v_pipe, c.v, n)
        self.values(s, c, n)
        self.keep_statistics(c)
        tk.mma_wait()
        self.release(s.v_pipe, c.v, n)

    def correct(self, c, late):
        """O so far, after the maximum has moved: at one of two places, which ``late`` names."""
        if self.config.late == late:
            tk.mul_row(c.o, c.o, c.correct)

    def wait(self, pipe, ring, n):
        for i in range(n):
            pipe.wait(ahead(ring, i))

    def release(self, pipe, ring, n=1):
        for _ in range(n):
            pipe.release(ring)
            ring.advance()

    def keep_statistics(self, c):
        tk.copy(c.last_max, c.max)
        tk.copy(c.last_norm, c.norm)

    # ---- writing out ---------------------------------------------------------------------------

    @cute.jit
    def finish(self, g, s, c):
        """Divide by the norm; write O, and perhaps the log-sum-exp, of the last task."""
        t, lse = c.last, tk.rv()
        row_tile = t["tile"] * self.config.consumers + c.wg
        self.softmax.statistics(g, c, lse)
        tk.mul_row(c.o, c.o, c.last_norm)
        if const_expr(self.spec.lse):
            self.store_lse(g, t, lse, row_tile * 64)
        if const_expr(self.config.o_direct):
            self.store_o(g, c, row_tile * 64)
        else:
            self.store_o_async(g, s, c, row_tile)

    def store_o(self, g, c, row):
        """From registers. row: as in ``store_lse``."""
        t = c.last
        first, end = self.rows_of(g, t)
        o = g.o[None, None, t["head"]] if self.spec.varlen else g.o[None, None, t["head"], t["batch"]]
        tk.store_narrow(o, c.o, first + row, end)

    @cute.jit
    def store_o_async(self, g, s, c, row_tile):
        """By way of shared memory."""
        t = c.last
        o, of = clipped(self.spec, g.o, t["batch"], g.tasks.lengths(t)[0])
        barrier, panel = 8 + c.wg, self.tiles.o.cols
        for p in cutlass.range_constexpr(self.config.o_panels):
            tk.store_wait()  # the store before has left the tile
            tk.sync(barrier, tk.WARPGROUP)
            tk.store(s.o[c.wg], tk.columns(c.o, p * panel, panel))
            tk.publish()
            tk.sync(barrier, tk.WARPGROUP)
            if tk.first_warp_of_group():
                tk.store_async(o, s.o[c.wg], (*of, t["head"], row_tile, p))
        if const_expr(self.config.o_over_q):
            tk.store_wait()
            tk.arrive(s.q_empty[c.wg])

    def rows_of(self, g, t):
        """(first, end) of the sequence's rows in lse, and in O as a tile has it; packed heads' rows each by itself."""
        pack, rows = self.spec.pack, g.tasks.lengths(t)[0]
        first = (t["batch"] - rows) * pack if self.spec.varlen else 0
        return first, first + rows * pack

    def store_lse(self, g, t, lse, row):
        """row: of the sequence's, the tile's first."""
        first, end = self.rows_of(g, t)
        of = g.lse[t["head"], None] if self.spec.varlen else g.lse[t["batch"], t["head"], None]
        tk.store_rows(of, lse, first + row, end)


def ahead(ring, n):
    """A position n stages further."""
    if n == 0:
        return ring
    further = tk.ring(ring.stages)
    further.count[0] = ring.count[0] + Uint32(n)
    return further
