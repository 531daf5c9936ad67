"""A consumer warpgroup of the attention kernel: 64 rows of Q and all that becomes of them."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention.forward.softmax import LEFT, RIGHT, Softmax
from tkq.attention.forward.state import Fields, State, Tiles, clipped, field_names


class Consumer:
    def __init__(self, spec, config):
        self.spec, self.config, self.softmax = spec, config, Softmax(spec, config)
        self.tiles, self.fields = Tiles.of(spec, config), field_names(spec)

    def state(self, s, wg):
        """Registers."""
        config, kv = self.config, self.config.kv
        return State(s=tk.rt_fl(kv), p=tk.rt(kv, self.tiles.q.dtype), o=tk.rt_fl(self.spec.head_dim_v),
                     max=tk.rv(), norm=tk.rv(), correct=tk.rv(), shift=tk.rv(), last_max=tk.rv(), last_norm=tk.rv(),
                     task=Fields.new(self.fields), last=Fields.new(self.fields),
                     k=s.k_pipe.ring(), v=s.v_pipe.ring(), q=tk.ring(config.q_stages),
                     ping_pong=tk.PingPong(config.consumers, wg, enabled=config.ping_pong), wg=wg)

    @cute.jit
    def run(self, g, s, wg):
        config, c = self.config, self.state(s, wg)
        c.ping_pong.start()
        blocks = self.next_task(s, c)
        if const_expr(config.overlap_tasks and not self.spec.varlen):
            self.begin(g, s, c)
        elif const_expr(config.overlap_tasks):
            if blocks > 0:  # there may be fewer tasks than blocks: how many is known only here
                self.begin(g, s, c)
        while blocks > 0:
            if const_expr(not config.overlap_tasks):
                self.begin(g, s, c)
            tk.zero(c.o)
            self.steps(g, s, c)
            if const_expr(not config.o_reuses_q_smem):
                tk.arrive(s.q_empty[self.q_at(c)])
            self.swap_task(c)
            if const_expr(config.overlap_tasks):
                blocks = self.next_task(s, c)
                if blocks > 0:
                    self.overlap_tasks(g, s, c)
                else:
                    self.end(s, c)
                self.finish(g, s, c)
            else:
                self.end(s, c)
                self.finish(g, s, c)
                blocks = self.next_task(s, c)
        tk.store_wait()

    def swap_task(self, c):
        """Move the current task to `last`; its epilogue runs later."""
        for f in range(len(self.fields)):
            c.last.values[f] = c.task.values[f]
        c.q.advance()

    def q_at(self, c):
        return c.q.stage * self.config.consumers + c.wg

    @cute.jit
    def next_task(self, s, c):
        """Wait for the next task's Q, and the task with it. How many blocks it has: none, and all is done."""
        i = self.q_at(c)
        tk.wait(s.q_full[i], c.q.phase)
        for f in cutlass.range_constexpr(len(self.fields)):
            c.task.values[f] = cute.arch.make_warp_uniform(s.task[f, i])
        return c.task["blocks"]

    @cute.jit
    def begin(self, g, s, c):
        """A task's first S = Q @ K.T, and its softmax."""
        s.k_pipe.wait(c.k)
        tk.mm_ABt(c.s, s.q[self.q_at(c)], s.k[c.k.stage])
        tk.mma_wait()
        self.release(s.k_pipe, c.k)
        self.softmax.first(g, c)
        tk.copy(c.p, c.s)

    @cute.jit
    def steps(self, g, s, c):
        """Each further S and softmax, over the P @ V of the block before."""
        blocks, n_masked_right = c.task["blocks"], Int32(1)
        if const_expr(self.spec.causal or self.spec.right):
            n_masked_right = c.task["n_masked_right"]
            for i in cutlass.range(1, n_masked_right, unroll=1):
                self.step(g, s, c, i, RIGHT | LEFT)
        whole = blocks
        if const_expr(self.spec.left):
            whole = blocks - c.task["n_masked_left"]
        for i in cutlass.range(n_masked_right, whole, unroll=1):
            self.step(g, s, c, i, 0)
        if const_expr(self.spec.left):
            for i in cutlass.range(whole, blocks, unroll=1):
                self.step(g, s, c, i, LEFT)

    @cute.jit
    def step(self, g, s, c, i, sides: Constexpr[int]):
        """The i-th block of the visit."""
        self.issue(s, c)
        moved = self.softmax.step(g, c, i, sides)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        tk.copy(c.p, c.s)
        self.correct_if(c, moved)

    def issue(self, s, c):
        """The next S = Q @ K.T, and O += P @ V of the block before; wait for S."""
        s.k_pipe.wait(c.k)
        c.ping_pong.take()
        tk.mm_ABt(c.s, s.q[self.q_at(c)], s.k[c.k.stage])
        s.v_pipe.wait(c.v)
        tk.mma_AB(c.o, c.p, s.v[c.v.stage])
        c.ping_pong.give()
        tk.mma_wait(1)
        self.release(s.k_pipe, c.k)

    @cute.jit
    def overlap_tasks(self, g, s, c):
        """The next task's first S and softmax, over this task's last P @ V."""
        self.issue(s, c)
        self.keep_statistics(c)
        self.softmax.first(g, c)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        tk.copy(c.p, c.s)

    @cute.jit
    def end(self, s, c):
        """The last P @ V."""
        s.v_pipe.wait(c.v)
        tk.mma_AB(c.o, c.p, s.v[c.v.stage])
        self.keep_statistics(c)
        tk.mma_wait()
        self.release(s.v_pipe, c.v)

    @cute.jit
    def correct_if(self, c, moved):
        """O so far, after max has moved."""
        if moved:
            tk.mul_row(c.o, c.o, c.correct)

    def release(self, pipe, ring):
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
        if const_expr(self.config.o_from_registers):
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
        """Through shared memory."""
        t = c.last
        o, of = clipped(self.spec, g.o, t["batch"], g.tasks.lengths(t)[0])
        barrier, panel = 8 + c.wg, self.tiles.o.cols
        for p in cutlass.range_constexpr(self.config.o_store_steps):
            tk.store_wait()  # the store before has left the tile
            tk.sync(barrier, tk.WARPGROUP)
            tk.store(s.o[c.wg], tk.columns(c.o, p * panel, panel))
            tk.publish()
            tk.sync(barrier, tk.WARPGROUP)
            if tk.first_warp_of_group():
                tk.store_async(o, s.o[c.wg], (*of, t["head"], row_tile, p))
        if const_expr(self.config.o_reuses_q_smem):
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
