"""A consumer warpgroup of the attention kernel: 64 rows of Q and all that becomes of them."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention.forward.softmax import LEFT, RIGHT, Softmax
from tkq.attention.forward.state import Fields, State, Tiles, clipped, field_names

STAGGER = 11  # the first of the named barriers that consumers begin tasks by


class Consumer:
    def __init__(self, spec, config, softmax=None):
        """softmax: another than the forward's own."""
        self.spec, self.config, self.softmax = spec, config, softmax or Softmax(spec, config)
        self.tiles, self.fields = Tiles.of(spec, config), field_names(spec)

    def state(self, smem, wg):
        """Registers."""
        config, kv = self.config, self.config.kv
        return State(s=tk.rt_fl(kv), p=tk.rt(kv, self.tiles.q.dtype), o=tk.rt_fl(self.spec.head_dim_v),
                     max=tk.rv(), norm=tk.rv(), correct=tk.rv(), shift=tk.rv(), last_max=tk.rv(), last_norm=tk.rv(),
                     task=Fields.new(self.fields), last=Fields.new(self.fields),
                     k=smem.k_pipe.ring(), v=smem.v_pipe.ring(), q=tk.ring(config.q_stages),
                     ping_pong=tk.PingPong(config.consumers, wg, enabled=config.ping_pong), wg=wg,
                     stagger=tk.PingPong(config.consumers, wg, config.stagger, STAGGER),
                     blocks=self.softmax.state(smem))

    @cute.jit
    def run(self, g, smem, wg):
        config, regs = self.config, self.state(smem, wg)
        regs.ping_pong.start()
        regs.stagger.start()
        blocks = self.next_task(smem, regs)
        if const_expr(config.overlap_tasks and not self.spec.varlen):
            self.begin(g, smem, regs)
        elif const_expr(config.overlap_tasks):
            if blocks > 0:  # there may be fewer tasks than blocks: how many is known only here
                self.begin(g, smem, regs)
        while blocks > 0:
            if const_expr(not config.overlap_tasks):
                self.begin(g, smem, regs)
            tk.zero(regs.o)
            self.steps(g, smem, regs)
            if const_expr(not config.o_reuses_q_smem):
                tk.arrive(smem.q_empty[self.q_at(regs)])
            self.swap_task(regs)
            if const_expr(config.overlap_tasks):
                blocks = self.next_task(smem, regs)
                if blocks > 0:
                    self.overlap_tasks(g, smem, regs)
                else:
                    self.end(smem, regs)
                self.finish(g, smem, regs)
            else:
                self.end(smem, regs)
                self.finish(g, smem, regs)
                blocks = self.next_task(smem, regs)
        tk.store_wait()

    def swap_task(self, regs):
        """Move the current task to `last`; its epilogue runs later."""
        for f in range(len(self.fields)):
            regs.last.values[f] = regs.task.values[f]
        regs.q.advance()

    def q_at(self, regs):
        return regs.q.stage * self.config.consumers + regs.wg

    @cute.jit
    def next_task(self, smem, regs):
        """Wait for the next task's Q, and the task with it. How many blocks it has: none, and all is done."""
        i = self.q_at(regs)
        tk.wait(smem.q_full[i], regs.q.phase)
        for f in cutlass.range_constexpr(len(self.fields)):
            regs.task.values[f] = cute.arch.make_warp_uniform(smem.task[f, i])
        return regs.task["blocks"]

    @cute.jit
    def begin(self, g, smem, regs):
        """A task's first S = Q @ K.T, and its softmax."""
        smem.k_pipe.wait(regs.k)
        regs.stagger.take()
        tk.mm_ABt(regs.s, smem.q[self.q_at(regs)], smem.k[regs.k.stage])
        tk.mma_wait()
        regs.stagger.give()
        self.release(smem.k_pipe, regs.k)
        self.softmax.first(g, regs)
        tk.copy(regs.p, regs.s)

    @cute.jit
    def steps(self, g, smem, regs):
        """Each further S and softmax, over the P @ V of the block before."""
        blocks, n_masked_right = regs.task["blocks"], Int32(1)
        if const_expr(self.spec.causal or self.spec.right):
            n_masked_right = regs.task["n_masked_right"]
            for i in cutlass.range(1, n_masked_right, unroll=1):
                self.step(g, smem, regs, i, RIGHT | LEFT)
        whole = blocks
        if const_expr(self.spec.left):
            whole = blocks - regs.task["n_masked_left"]
        for i in cutlass.range(n_masked_right, whole, unroll=1):
            self.step(g, smem, regs, i, 0)
        if const_expr(self.spec.left):
            for i in cutlass.range(whole, blocks, unroll=1):
                self.step(g, smem, regs, i, LEFT)

    @cute.jit
    def step(self, g, smem, regs, i, sides: Constexpr[int]):
        """The i-th block of the visit."""
        self.issue(smem, regs)
        moved = self.softmax.step(g, regs, i, sides)
        tk.mma_wait(0)
        self.release(smem.v_pipe, regs.v)
        tk.copy(regs.p, regs.s)
        self.correct_if(regs, moved)

    def issue(self, smem, regs):
        """The next S = Q @ K.T, and O += P @ V of the block before; wait for S."""
        smem.k_pipe.wait(regs.k)
        regs.ping_pong.take()
        tk.mm_ABt(regs.s, smem.q[self.q_at(regs)], smem.k[regs.k.stage])
        smem.v_pipe.wait(regs.v)
        tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage])
        regs.ping_pong.give()
        tk.mma_wait(1)
        self.release(smem.k_pipe, regs.k)

    @cute.jit
    def overlap_tasks(self, g, smem, regs):
        """The next task's first S and softmax, over this task's last P @ V."""
        self.issue(smem, regs)
        self.save_statistics(regs)
        self.softmax.first(g, regs)
        tk.mma_wait(0)
        self.release(smem.v_pipe, regs.v)
        tk.copy(regs.p, regs.s)

    @cute.jit
    def end(self, smem, regs):
        """The last P @ V."""
        smem.v_pipe.wait(regs.v)
        tk.mma_AB(regs.o, regs.p, smem.v[regs.v.stage])
        self.save_statistics(regs)
        tk.mma_wait()
        self.release(smem.v_pipe, regs.v)

    @cute.jit
    def correct_if(self, regs, moved):
        """O so far, after max has moved."""
        if moved:
            tk.mul_row(regs.o, regs.o, regs.correct)

    def release(self, pipe, ring):
        pipe.release(ring)
        ring.advance()

    def save_statistics(self, regs):
        tk.copy(regs.last_max, regs.max)
        tk.copy(regs.last_norm, regs.norm)

    # ---- writing out ---------------------------------------------------------------------------

    @cute.jit
    def finish(self, g, smem, regs):
        """Divide by the norm; write O, and perhaps the log-sum-exp, of the last task."""
        t, lse = regs.last, tk.rv()
        row_tile = t["tile"] * self.config.consumers + regs.wg
        self.softmax.statistics(g, regs, lse)
        tk.mul_row(regs.o, regs.o, regs.last_norm)
        if const_expr(self.spec.lse):
            self.store_lse(g, t, lse, row_tile * 64)
        if const_expr(self.config.o_from_registers):
            self.store_o(g, regs, row_tile * 64)
        else:
            self.store_o_async(g, smem, regs, row_tile)

    def store_o(self, g, regs, row):
        """From registers. row: as in ``store_lse``."""
        t = regs.last
        first, end = self.rows_of(g, t)
        o = g.o[None, None, t["head"]] if self.spec.varlen else g.o[None, None, t["head"], t["batch"]]
        tk.store_narrow(o, regs.o, first + row, end)

    @cute.jit
    def store_o_async(self, g, smem, regs, row_tile):
        """Through shared memory."""
        t = regs.last
        o, of = clipped(self.spec, g.o, t["batch"], g.tasks.lengths(t)[0])
        barrier, panel = 8 + regs.wg, self.tiles.o.cols
        for p in cutlass.range_constexpr(self.config.o_store_steps):
            tk.store_wait()  # the store before has left the tile
            tk.sync(barrier, tk.WARPGROUP)
            tk.store(smem.o[regs.wg], tk.columns(regs.o, p * panel, panel))
            tk.publish()
            tk.sync(barrier, tk.WARPGROUP)
            if tk.first_warp_of_group():
                tk.store_async(o, smem.o[regs.wg], (*of, t["head"], row_tile, p))
        if const_expr(self.config.o_reuses_q_smem):
            tk.store_wait()
            tk.arrive(smem.q_empty[regs.wg])

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
