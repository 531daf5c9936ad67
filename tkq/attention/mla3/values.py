"""A half of the sum of values: left or right."""
import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla3.output import DONE, THREE, Output
from tkq.attention.mla3.state import HALF
from tkq.attention.mla3.state import Values as State


class Values:
    def __init__(self, spec, config, left):
        self.config, self.walk, self.output, self.left = config, Walk(spec), Output(spec), left

    @cute.jit
    def run(self, g, smem):
        tk.sync_arrive(DONE, THREE)
        regs = State(o=tk.rt_fl(HALF // 2), o2=tk.rt_fl(HALF // 2), correct=tk.rv(), ring=smem.left_pipe.ring(), rope=smem.rope_pipe.ring(), ahead=smem.rope_pipe.ring())
        at = self.walk.begin(g)
        while at[X] < at[END]:
            s = self.walk.segment(g, at)
            if s.first < s.end:
                self.segment(g, smem, regs, s)
            self.walk.advance(g, at, s)

    @cute.jit
    def segment(self, g, smem, regs, s):
        tk.zero(regs.o)
        tk.zero(regs.o2)
        regs.ahead.advance()
        for block in cutlass.range(s.first, s.end, unroll=1):
            self.block(smem, regs, block + 1 < s.end)
        self.output.values(g, smem, regs, s, 0 if self.left else HALF)

    @cute.jit
    def block(self, smem, regs, more):
        """O += P V, once P and the factors of the rows are there."""
        here = regs.rope.stage
        tile, pipe = (smem.left, smem.left_pipe) if self.left else (smem.right, smem.right_pipe)
        pipe.wait(regs.ring)
        tk.wait(smem.p_full[here], regs.rope.phase)
        tk.publish()
        moved = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(2):
            factor = smem.correct[tk.first_row() + 8 * r, here]
            moved = moved | (factor != cutlass.Float32(1.0))
            regs.correct.tensor[r] = factor
        if cute.arch.vote_any_sync(moved):
            tk.mul_row(regs.o, regs.o, regs.correct)
            tk.mul_row(regs.o2, regs.o2, regs.correct)
        if cutlass.const_expr(self.config.lag):
            if more:
                tk.wait(smem.s_full[regs.ahead.stage], regs.ahead.phase)
                regs.ahead.advance()
        tk.mma_AB(regs.o, smem.rope[here], tile[regs.ring.stage], b_part=0)
        tk.mma_AB(regs.o2, smem.rope[here], tile[regs.ring.stage], b_part=1)
        tk.mma_wait(0)
        smem.rope_pipe.release(regs.rope)
        pipe.release(regs.ring)
        regs.rope.advance()
        regs.ring.advance()
