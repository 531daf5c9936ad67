"""The warpgroup that has the scores: their softmax, and the left half of the sum of values."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.decode.consumer import Consumer
from tkq.attention.decode.output import Output as Refusal
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla_two.output import Output, load_q
from tkq.attention.mla_two.state import HALF
from tkq.attention.mla_two.state import Scores as State
from tkq.attention.mla_two.tiles import own


class Scores:
    """Of a block of keys: S = Q K', its exponentials P, which also go to the other warpgroup by way of shared memory,
    and O += P V of the left half, over which the next scores begin."""

    def __init__(self, spec, config):
        self.spec, self.config, self.walk = spec, config, Walk(spec)
        self.dtype, self.output = tk.element_type(spec.dtype), Output(spec)
        self.keys, self.refusal = Consumer(spec, config), Refusal(spec)

    def state(self, smem):
        ints = lambda: cute.make_rmem_tensor((3,), Int32)
        return State(s=tk.rt_fl(self.config.keys), p=tk.rt(self.config.keys, self.dtype), o=tk.rt_fl(HALF),
                     max=tk.rv(), norm=tk.rv(), correct=tk.rv(), shift=tk.rv(), first=ints(), end=ints(), fault=ints(),
                     left=smem.left_pipe.ring(), done=smem.left_pipe.ring(), right=smem.right_pipe.ring())

    @cute.jit
    def run(self, g, smem):
        regs = self.state(smem)
        at = self.walk.begin(g)
        while at[X] < at[END]:
            s = own(g, self.walk.segment(g, at))
            if s.first < s.end:
                self.segment(g, smem, regs, s)
            self.walk.advance(g, at, s)
        if self.walk.matches(g):
            pass
        else:
            self.refusal.refuse(g)

    @cute.jit
    def segment(self, g, smem, regs, s):
        tk.zero(regs.o)
        tk.zero(regs.norm)
        tk.neg_infty(regs.max)
        fine = s.inside & (s.length == g.seqlens[s.batch])
        regs.fault[0] = cutlass.select_(fine, Int32(0), Int32(1))
        self.keys.tell(g.plan, fine)
        self.keys.limits(g, regs, s)
        load_q(g, s, ((smem.q.left, 0, 4),))
        for block in cutlass.range(s.first, s.end, unroll=1):
            smem.left_pipe.wait(regs.left)
            tk.publish()  # cp.async wrote the tile: wgmma reads it by another proxy
            tk.mm_ABt(regs.s, smem.q.left[0], smem.k.left[regs.left.stage])
            if block > s.first:
                tk.mma_wait(1)  # the block before: its left half is free
                self.release(smem, regs)
            self.block(g, smem, regs, block)
        tk.quad_sum(regs.norm)
        tk.mma_wait(0)
        self.release(smem, regs)
        self.output.scores(g, smem, regs, s)

    def release(self, smem, regs):
        smem.left_pipe.release(regs.done)
        regs.done.advance()

    @cute.jit
    def block(self, g, smem, regs, block):
        stage = regs.right.stage
        smem.right_pipe.wait(regs.right)
        tk.publish()
        tk.mma_ABt(regs.s, smem.q.rope[0], smem.k.rope[stage])
        tk.mma_ABt(regs.s, smem.q.right[0], smem.k.right[stage])
        tk.mma_wait(0)
        if cutlass.const_expr(self.config.lag):
            tk.arrive(smem.s_full[stage])
        moved = self.softmax(g, smem, regs, (stage, block))
        tk.copy(regs.p, regs.s)
        tk.store(smem.k.rope[stage], regs.p)
        tk.store_rows(smem.correct[None, stage], regs.correct, 0, tk.ROWS)
        tk.publish()
        cute.arch.sync_warp()
        tk.arrive(smem.p_full[stage])
        if moved:
            tk.mul_row(regs.o, regs.o, regs.correct)
        tk.mma_AB(regs.o, regs.p, smem.k.left[regs.left.stage])
        regs.left.advance()
        regs.right.advance()

    @cute.jit
    def softmax(self, g, smem, regs, place):
        """S, of a block of keys, becomes exponentials. Did max of a row of the warp's move?"""
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
        moved = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(2):
            top = cute.arch.fmax(regs.max.tensor[r], regs.shift.tensor[r])
            moved = moved | (top > regs.max.tensor[r])
            regs.max.tensor[r] = top
        tk.finite_or_zero(regs.shift, regs.max)
        tk.sub(regs.correct, regs.correct, regs.shift)
        tk.exp2(regs.correct, regs.correct)
        tk.mul(regs.norm, regs.norm, regs.correct)
        tk.mul(regs.s, regs.s, g.scale)
        tk.sub_row(regs.s, regs.s, regs.shift)
        tk.exp2(regs.s, regs.s)
        tk.row_sum_partial(regs.norm, regs.s, regs.norm)
        return cute.arch.vote_any_sync(moved)
