"""A half of the sum of values: left or right."""
import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.attention.mla4.copies import copy_panels, q_rows
from tkq.attention.mla4.output import DONE, QUERIES, THREE, Output
from tkq.attention.mla4.state import HALF, Segment
from tkq.attention.mla4.state import Values as State


class Values:
    def __init__(self, spec, config, left):
        self.config, self.output, self.left = config, Output(spec), left

    @cute.jit
    def run(self, g, smem):
        tk.sync_arrive(DONE, THREE)
        regs = State(o=tk.rt_fl(HALF // 2), o2=tk.rt_fl(HALF // 2), correct=tk.rv(), deep=smem.left_pipe.ring(), pair=smem.p_pipe.ring(), ahead=smem.p_pipe.ring(),
                     segment=smem.segment_pipe.ring())
        smem.segment_pipe.wait(regs.segment)
        while smem.segments[0, regs.segment.stage] >= 0:
            self.segment(g, smem, regs)
            smem.segment_pipe.release(regs.segment)
            regs.segment.advance()
            smem.segment_pipe.wait(regs.segment)

    @cute.jit
    def segment(self, g, smem, regs):
        s = Segment.read(smem, regs.segment)
        tk.zero(regs.o)
        tk.zero(regs.o2)
        if cutlass.const_expr(self.left):
            self.rest_of_q(g, smem, s)
        regs.ahead.advance()
        for block in cutlass.range(s.first, s.end, unroll=1):
            self.block(smem, regs, block + 1 < s.end)
        self.output.values(g, smem, regs, Segment.read(smem, regs.segment), 0 if self.left else HALF)

    @cute.jit
    def rest_of_q(self, g, smem, s):
        """What the warpgroup of the scores has no registers for. It is past those of the segment before."""
        rows = q_rows(g, s)
        copy_panels(smem.q, 0, rows, 6, 2, 2)
        copy_panels(smem.q_rope, 0, rows, 8, 1)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        tk.publish()
        tk.sync_arrive(QUERIES, 2 * tk.WARPGROUP)

    @cute.jit
    def block(self, smem, regs, more):
        """O += P V, once P and the factors of the rows are there."""
        pair = regs.pair.stage
        tile, pipe, ring = (smem.left, smem.left_pipe, regs.deep) if self.left else (
            smem.right, smem.right_pipe, regs.pair)
        pipe.wait(ring)
        smem.p_pipe.wait(regs.pair)
        tk.publish()
        moved = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(2):
            factor = smem.correct[tk.first_row() + 8 * r, pair]
            moved = moved | (factor != cutlass.Float32(1.0))
            regs.correct.tensor[r] = factor
        if cute.arch.vote_any_sync(moved):
            tk.mul_row(regs.o, regs.o, regs.correct)
            tk.mul_row(regs.o2, regs.o2, regs.correct)
        if cutlass.const_expr(self.config.lag and self.left):
            if more:
                tk.wait(smem.s_full[regs.ahead.stage], regs.ahead.phase)
                regs.ahead.advance()
        tk.mma_AB(regs.o, smem.p[pair], tile[ring.stage], b_part=0)
        tk.mma_AB(regs.o2, smem.p[pair], tile[ring.stage], b_part=1)
        tk.mma_wait(0)
        smem.p_pipe.release(regs.pair)
        pipe.release(ring)
        regs.pair.advance()
        if cutlass.const_expr(self.left):
            regs.deep.advance()
