"""A consumer warpgroup of float8 attention: 64 rows of Q and all that becomes of them."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.forward.softmax import LEFT, RIGHT
from tkq.attention.forward.state import Fields
from tkq.attention.fp8.config import ONES
from tkq.attention.fp8.softmax import Fp8Softmax
from tkq.attention.fp8.state import State, field_names

SMALLEST = 2.0**-126  # that float32 has in full


class Consumer:
    def __init__(self, spec, config):
        self.spec, self.config, self.softmax = spec, config, Fp8Softmax(spec, config)
        self.fields, self.cols = field_names(spec), spec.head_dim // config.parts
        self.by_ones = config.row_sum == "mma"

    def state(self, smem, wg):
        """Registers."""
        config, kv = self.config, self.config.kv
        return State(s=tk.rt_fl(kv), p=tk.rt(kv, smem.q.type.dtype),
                     o=tuple(tk.rt_fl(self.cols) for _ in range(config.parts)),
                     product=tk.rt_fl(self.cols) if self.spec.two_level else None,
                     sums=tk.rt_fl(ONES) if self.by_ones else None, max=tk.rv(), norm=tk.rv(),
                     correct=tk.rv(), shift=tk.rv(), last_max=tk.rv(), last_norm=tk.rv(),
                     factors=cute.make_rmem_tensor((2,), Float32), task=Fields.new(self.fields),
                     k=smem.k_pipe.ring(), v=smem.v_pipe.ring(), q=tk.ring(config.q_stages),
                     ping_pong=tk.PingPong(config.consumers, wg, enabled=config.ping_pong), wg=wg)

    @cute.jit
    def run(self, g, smem, wg):
        regs = self.state(smem, wg)
        regs.ping_pong.start()
        blocks = self.next_task(g, smem, regs)
        while blocks > 0:
            self.begin(g, smem, regs)
            self.steps(g, smem, regs)
            tk.arrive(smem.q_empty[self.q_at(regs)])
            regs.q.advance()
            self.end(smem, regs)
            self.finish(g, regs)
            blocks = self.next_task(g, smem, regs)

    def q_at(self, regs):
        return regs.q.stage * self.config.consumers + regs.wg

    @cute.jit
    def next_task(self, g, smem, regs):
        """Wait for the next task's Q, and the task with it. How many blocks it has: none, and all is done."""
        i = self.q_at(regs)
        tk.wait(smem.q_full[i], regs.q.phase)
        for f in cutlass.range_constexpr(len(self.fields)):
            regs.task.values[f] = cute.arch.make_warp_uniform(smem.task[f, i])
        blocks = regs.task["blocks"]
        if const_expr(self.spec.descales):
            if blocks > 0:
                self.find_factors(g, regs)
        return blocks

    def find_factors(self, g, regs):
        """Of the task's scores, and of its O."""
        at, scale = (self.sequence(g, regs), regs.task["head"] // g.tasks.heads_per_kv), g.scale
        for name, of in (("q", g.q_descale), ("k", g.k_descale)):
            scale = scale * of[at] if name in self.spec.descales else scale
        # not 0, times which the -inf of a key that is not seen would be NaN
        regs.factors[0] = cute.arch.fmax(self.if_any_key(regs, scale), Float32(SMALLEST), nan=True)
        if "v" in self.spec.descales:
            regs.factors[1] = self.if_any_key(regs, g.v_descale[at])

    def sequence(self, g, regs):
        """Of a task: whose descales are its own. Behind the last one: the last one."""
        if not self.spec.varlen:
            return regs.task["batch"]
        return cutlass.min(regs.task["sequence"], g.tasks.count - 1)

    def if_any_key(self, regs, factor):
        """A factor of the task's sequence, or 1 where it has no key: what is 0 then stays so beside any number."""
        if not self.spec.varlen:
            return factor
        return cutlass.select_(regs.task["rows_k"] > 0, factor, Float32(1.0))

    # ---- products --------------------------------------------------------------------------------

    def scores(self, smem, regs):
        """Begin S = Q @ K.T of the next block."""
        smem.k_pipe.wait(regs.k)
        tk.mm_ABt(regs.s, smem.q[self.q_at(regs)], smem.k[regs.k.stage])

    @cute.jit
    def begin(self, g, smem, regs):
        """A task's first S, and its softmax."""
        for o in regs.o:
            tk.zero(o)
        self.scores(smem, regs)
        tk.mma_wait()
        self.release(smem.k_pipe, regs.k)
        self.softmax.first(g, regs)
        self.softmax.narrow(g, regs)

    @cute.jit
    def steps(self, g, smem, regs):
        """Each further S and softmax, and the P @ V of the block before."""
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

    def step(self, g, smem, regs, i, sides: Constexpr[int]):
        """The i-th block of the visit."""
        (self.overlapped if self.config.overlap else self.serial)(g, smem, regs, i, sides)

    @cute.jit
    def overlapped(self, g, smem, regs, i, sides: Constexpr[int]):
        """S and its softmax over the P @ V of the block before."""
        smem.k_pipe.wait(regs.k)
        regs.ping_pong.take()
        tk.mm_ABt(regs.s, smem.q[self.q_at(regs)], smem.k[regs.k.stage])
        smem.v_pipe.wait(regs.v)
        self.multiply(smem, regs, 0)
        self.sum_up(smem, regs)
        if const_expr(self.config.hand_over == "products"):
            regs.ping_pong.give()
        tk.mma_wait(2 if const_expr(self.by_ones) else 1)
        self.release(smem.k_pipe, regs.k)
        moved = self.softmax.step(g, regs, i, sides)
        tk.mma_wait(0)
        self.release(smem.v_pipe, regs.v)
        self.promote(regs, 0)
        self.add_sums(regs)
        self.softmax.narrow(g, regs)
        self.correct_if(regs, moved)

    @cute.jit
    def serial(self, g, smem, regs, i, sides: Constexpr[int]):
        """First the P @ V of the block before, then S, in the same registers."""
        self.values(smem, regs)
        self.scores(smem, regs)
        tk.mma_wait()
        self.release(smem.k_pipe, regs.k)
        moved = self.softmax.step(g, regs, i, sides)
        self.softmax.narrow(g, regs)
        self.correct_if(regs, moved)

    def multiply(self, smem, regs, part):
        """Begin the P @ V of a tile of O: by itself, or as a part of the sum."""
        v = smem.v[regs.v.stage]
        if self.spec.two_level:
            tk.mm_ABt(regs.product, regs.p, v, b_part=part)
        else:
            tk.mma_ABt(regs.o[part], regs.p, v, b_part=part)

    def sum_up(self, smem, regs):
        """Begin the sums of P's columns, with row_sum="mma"."""
        if self.by_ones:
            tk.mm_ABt(regs.sums, regs.p, smem.ones[0])

    def add_sums(self, regs):
        """To norm, in float32, when they are there: all columns of a product with ones are the same."""
        if self.by_ones:
            for r in range(2):
                regs.norm.tensor[r] = regs.norm.tensor[r] + regs.sums.tensor[2 * r]

    def promote(self, regs, part):
        """Of two levels: the product, when it is there, is added to O."""
        if self.spec.two_level:
            tk.add(regs.o[part], regs.o[part], regs.product)

    def values(self, smem, regs):
        """O += P @ V."""
        smem.v_pipe.wait(regs.v)
        self.sum_up(smem, regs)
        for part in range(self.config.parts):
            self.multiply(smem, regs, part)
            tk.mma_wait(0)
            self.promote(regs, part)
        self.add_sums(regs)
        self.release(smem.v_pipe, regs.v)

    @cute.jit
    def end(self, smem, regs):
        """The last P @ V."""
        self.values(smem, regs)

    @cute.jit
    def correct_if(self, regs, moved):
        """O so far, after max has moved."""
        if moved:
            for part in cutlass.range_constexpr(self.config.parts):
                tk.mul_row(regs.o[part], regs.o[part], regs.correct)
            if const_expr(self.by_ones):
                tk.mul(regs.norm, regs.norm, regs.correct)

    def release(self, pipe, ring):
        pipe.release(ring)
        ring.advance()

    # ---- writing out ---------------------------------------------------------------------------

    @cute.jit
    def finish(self, g, regs):
        """Divide by the norm; write O, and perhaps the log-sum-exp."""
        t, lse = regs.task, tk.rv()
        row, end = self.rows_of(g, t, (t["tile"] * self.config.consumers + regs.wg) * 64)
        of = (t["head"],) if const_expr(self.spec.varlen) else (t["head"], t["batch"])
        tk.copy(regs.last_max, regs.max)
        tk.copy(regs.last_norm, regs.norm)
        if const_expr(self.by_ones):  # each of the four threads of a row has all of its sum, and they are added
            tk.mul(regs.last_norm, regs.last_norm, 0.25)
        self.softmax.statistics(g, regs, lse)
        for part in cutlass.range_constexpr(self.config.parts):
            tk.mul_row(regs.o[part], regs.o[part], regs.last_norm)
            tk.store_narrow(self.columns(g.o[(None, None, *of)], part), regs.o[part], row, end)
        if const_expr(self.spec.lse):
            tk.store_rows(g.lse[(*reversed(of), None)], lse, row, end)

    def rows_of(self, g, t, row):
        """(row of the tensors that is row ``row`` of the task's sequence, where that ends)"""
        if not self.spec.varlen:
            return row, g.tasks.rows_q
        return t["batch"] - t["rows_q"] + row, t["batch"]

    def columns(self, o, part):
        """O from the first column of a tile on."""
        if part == 0:
            return o
        (rows, cols), (row, col), first = o.shape, o.stride, part * self.cols
        return cute.make_tensor(o.iterator + first, cute.make_layout((rows, cols - first), stride=(row, col)))
