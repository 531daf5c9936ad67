"""The warpgroup that has the scores and their softmax."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.decode.consumer import Consumer
from tkq.attention.decode.output import Output as Refusal
from tkq.attention.decode.output import rows_of
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla3.output import QUERIES, THREE, Output
from tkq.attention.mla3.state import Scores as State
from tkq.attention.mla3.copies import copy_panels, q_rows


class Scores:
    def __init__(self, spec, config):
        self.spec, self.config, self.walk = spec, config, Walk(spec)
        self.dtype, self.output = tk.element_type(spec.dtype), Output(spec)
        self.keys, self.refusal = Consumer(spec, config), Refusal(spec)

    def state(self, smem):
        ints = lambda: cute.make_rmem_tensor((3,), Int32)
        return State(q_left=tk.rt(256, self.dtype), q_right=tk.rt(256, self.dtype), s=tk.rt_fl(self.config.keys),
                     max=tk.rv(), norm=tk.rv(), correct=tk.rv(), shift=tk.rv(), first=ints(), end=ints(), fault=ints(),
                     ring=smem.left_pipe.ring(), rope=smem.rope_pipe.ring())

    @cute.jit
    def run(self, g, smem):
        regs = self.state(smem)
        at = self.walk.begin(g)
        while at[X] < at[END]:
            s = self.walk.segment(g, at)
            if s.first < s.end:
                self.segment(g, smem, regs, s)
            self.walk.advance(g, at, s)
        if self.walk.matches(g):
            pass
        else:
            self.refusal.refuse(g)

    @cute.jit
    def load_q(self, g, smem, regs, s):
        x = rows_of(g.q, g, s)
        for q, column, n in ((regs.q_left, 0, 32), (regs.q_right, 256, 8)):
            words = cute.recast_tensor(q.tensor, Int32)
            for r in cutlass.range_constexpr(2):
                row = s.tile * ROWS + tk.first_row() + 8 * r
                for j in cutlass.range_constexpr(n):
                    words[2 * j + r] = Int32(0)
                if row < g.queries * g.group:
                    at = (x.iterator + (cute.crd2idx((row, 0), x.layout) + tk.first_col() + column)).align(4)
                    pairs = cute.make_tensor(cute.recast_ptr(at, dtype=Int32), cute.make_layout(n, stride=4))
                    for j in cutlass.range_constexpr(n):
                        words[2 * j + r] = pairs[j]

    @cute.jit
    def segment(self, g, smem, regs, s):
        tk.zero(regs.norm)
        tk.neg_infty(regs.max)
        fine = s.inside & (s.length == g.seqlens[s.batch])
        regs.fault[0] = cutlass.select_(fine, Int32(0), Int32(1))
        self.keys.tell(g.plan, fine)
        self.keys.limits(g, regs, s)
        self.load_q(g, smem, regs, s)
        rows = q_rows(g, s)
        tk.sync(QUERIES, tk.WARPGROUP)
        copy_panels(smem.q7, 0, rows, 7, 1, 3)
        copy_panels(smem.q_rope, 0, rows, 8, 1)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        tk.publish()
        tk.sync(QUERIES, tk.WARPGROUP)
        for block in cutlass.range(s.first, s.end, unroll=1):
            self.block(g, smem, regs, block)
        tk.quad_sum(regs.norm)
        self.output.scores(g, smem, regs, s)

    @cute.jit
    def block(self, g, smem, regs, block):
        stage, here = regs.ring.stage, regs.rope.stage
        smem.left_pipe.wait(regs.ring)
        tk.publish()
        tk.mm_ABt(regs.s, regs.q_left, smem.left[stage])
        smem.right_pipe.wait(regs.ring)
        tk.publish()
        tk.mma_ABt(regs.s, regs.q_right, smem.right[stage], k=(0, 64))
        tk.mma_ABt(regs.s, smem.q7[0], smem.right[stage], k=(192, 256))
        tk.mma_ABt(regs.s, smem.q7[0], smem.right[stage], k=(192, 256))
        tk.mma_ABt(regs.s, smem.q7[0], smem.right[stage], k=(192, 256))
        smem.rope_pipe.wait(regs.rope)
        tk.publish()
        tk.mma_ABt(regs.s, smem.q_rope[0], smem.rope[here])
        tk.mma_wait(0)
        if cutlass.const_expr(self.config.lag):
            tk.arrive(smem.s_full[here])
        self.softmax(g, smem, regs, (stage, block))
        tk.store(smem.rope[here], regs.s)
        tk.store_rows(smem.correct[None, here], regs.correct, 0, tk.ROWS)
        tk.publish()
        cute.arch.sync_warp()
        tk.arrive(smem.p_full[here])
        regs.ring.advance()
        regs.rope.advance()

    @cute.jit
    def softmax(self, g, smem, regs, place):
        stage, block = place
        there = [smem.there[w, stage] for w in range(4)]
        bad = smem.bad[0, stage] | smem.bad[1, stage] | smem.bad[2, stage] | smem.bad[3, stage]
        regs.fault[0] = regs.fault[0] | bad
        self.keys.mask(regs, there)
        if cutlass.const_expr(self.spec.edges):
            self.keys.edges(g, regs, block)
        tk.copy(regs.correct, regs.max)
        tk.row_max(regs.shift, regs.s)
        tk.mul(regs.shift, regs.shift, g.scale)
        for r in cutlass.range_constexpr(2):
            regs.max.tensor[r] = cute.arch.fmax(regs.max.tensor[r], regs.shift.tensor[r])
        tk.finite_or_zero(regs.shift, regs.max)
        tk.sub(regs.correct, regs.correct, regs.shift)
        tk.exp2(regs.correct, regs.correct)
        tk.mul(regs.norm, regs.norm, regs.correct)
        tk.mul(regs.s, regs.s, g.scale)
        tk.sub_row(regs.s, regs.s, regs.shift)
        tk.exp2(regs.s, regs.s)
        tk.row_sum_partial(regs.norm, regs.s, regs.norm)
