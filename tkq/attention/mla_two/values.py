"""The other warpgroup: the right half of the sum of values."""
import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.attention.decode.walk import END, Walk, X
from tkq.attention.mla_two.output import Output, load_q
from tkq.attention.mla_two.state import HALF
from tkq.attention.mla_two.state import Values as State
from tkq.attention.mla_two.tiles import own


class Values:
    def __init__(self, spec, config):
        self.config, self.walk, self.output = config, Walk(spec), Output(spec)

    @cute.jit
    def run(self, g, smem):
        regs = State(o=tk.rt_fl(HALF), correct=tk.rv(), right=smem.right_pipe.ring(), ahead=smem.right_pipe.ring())
        at = self.walk.begin(g)
        while at[X] < at[END]:
            s = own(g, self.walk.segment(g, at))
            if s.first < s.end:
                self.segment(g, smem, regs, s)
            self.walk.advance(g, at, s)

    @cute.jit
    def segment(self, g, smem, regs, s):
        tk.zero(regs.o)
        load_q(g, s, ((smem.q.right, 4, 4), (smem.q.rope, 8, 1)))
        regs.ahead.advance()
        for block in cutlass.range(s.first, s.end, unroll=1):
            self.block(smem, regs, block + 1 < s.end)
        self.output.values(g, smem, regs, s)

    @cute.jit
    def block(self, smem, regs, more):
        """O += P V, once P and the factors of the rows are there."""
        stage = regs.right.stage
        smem.right_pipe.wait(regs.right)
        tk.wait(smem.p_full[stage], regs.right.phase)
        tk.publish()
        moved = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(2):
            factor = smem.correct[tk.first_row() + 8 * r, stage]
            moved = moved | (factor != cutlass.Float32(1.0))
            regs.correct.tensor[r] = factor
        if cute.arch.vote_any_sync(moved):
            tk.mul_row(regs.o, regs.o, regs.correct)
        if cutlass.const_expr(self.config.lag):
            if more:
                tk.wait(smem.s_full[regs.ahead.stage], regs.ahead.phase)
                regs.ahead.advance()
        tk.mma_AB(regs.o, smem.k.rope[stage], smem.k.right[stage])
        tk.mma_wait(0)
        smem.right_pipe.release(regs.right)
        regs.right.advance()
