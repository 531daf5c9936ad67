"""Two warpgroups: half of the columns of the sum of values each."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

import tkq.tile as tk
from tkq.attention.mla.output import ALL, INVERSE_IS_READ, Output
from tkq.attention.mla.state import HALF, Segment
from tkq.attention.mla.state import Values as State
from tkq.attention.mla.tiles import see_tile
from tkq.tile.assembly import ptx


class Values:
    """O += P V, of one half."""

    def __init__(self, spec, config, left):
        self.config, self.output, self.left = config, Output(spec, config), left

    @cute.jit
    def run(self, g, smem):
        ring = smem.p_pipe.ring
        regs = State(o=(tk.rt_fl(HALF // 2), tk.rt_fl(HALF // 2)), correct=tk.rv(), deep=smem.left_pipe.ring(),
                     pair=ring(), ahead=ring(), segment=smem.segment_pipe.ring())
        tk.sync_arrive(INVERSE_IS_READ, ALL)
        smem.segment_pipe.wait(regs.segment)
        while smem.segments[0, regs.segment.stage] >= 0:
            self.segment(g, smem, regs)
            smem.segment_pipe.release(regs.segment)
            regs.segment.advance()
            smem.segment_pipe.wait(regs.segment)

    @cute.jit
    def segment(self, g, smem, regs):
        s = Segment.read(smem, regs.segment)
        for o in regs.o:
            tk.zero(o)
        regs.ahead.advance()
        for block in cutlass.range(s.first, s.end, unroll=1):
            self.block(smem, regs, block + 1 < s.end)
        self.output.values(g, smem, regs, Segment.read(smem, regs.segment), 0 if self.left else HALF)

    @cute.jit
    def clear(self, smem, tile, stage):
        """Rows that are not there: 0 * NaN would be NaN."""
        there = smem.there if const_expr(self.left) else smem.bad
        words = [there[w, stage] for w in range(4)]
        if (words[0] & words[1] & words[2] & words[3]) != 0xFFFF:
            row, half = tk.thread_in_warpgroup() // 2, tk.thread_in_warpgroup() % 2
            if (there[row // 16, stage] >> (row % 16)) & 1 == 0:
                at = tile.staged.iterator.toint() + stage * tile.type.bytes + row * 128 + half * 64
                for i in cutlass.range_constexpr(16):
                    zero16(Int32(at) + i // 4 * (64 * 128) + i % 4 * 16)
            tk.publish()
            tk.sync(4 if const_expr(self.left) else 5, tk.WARPGROUP)

    @cute.jit
    def block(self, smem, regs, more):
        """Of a block of keys, once P and the factors of the rows are there. more: is there a block behind it?"""
        pair = regs.pair.stage
        tile, pipe, ring = (smem.left, smem.left_pipe, regs.deep) if self.left else (
            smem.right, smem.right_pipe, regs.pair)
        pipe.wait(ring)
        see_tile(self.config)  # P's writers have published it
        smem.p_pipe.wait(regs.pair)
        if const_expr(self.config.multicast):
            self.clear(smem, tile, (regs.deep if self.left else regs.pair).stage)
        moved = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(2):
            factor = smem.correct[tk.first_row() + 8 * r, pair]
            moved = moved | (factor != Float32(1.0))
            regs.correct.tensor[r] = factor
        if cute.arch.vote_any_sync(moved):
            for o in regs.o:
                tk.mul_row(o, o, regs.correct)
        if const_expr(self.left):
            if more:
                tk.wait(smem.scored[regs.ahead.stage], regs.ahead.phase)
                regs.ahead.advance()
        for part in cutlass.range_constexpr(2):
            tk.mma_AB(regs.o[part], smem.p[pair], tile[ring.stage], b_part=part)
        tk.mma_wait(0)
        smem.p_pipe.release(regs.pair)
        pipe.release(ring)
        regs.pair.advance()
        if const_expr(self.left):
            regs.deep.advance()


@dsl_user_op
def zero16(at, *, loc=None, ip=None):
    """16 bytes of shared memory become 0."""
    ptx([Int32(at)], "{ .reg .b32 z; mov.u32 z, 0; st.shared.v4.b32 [$0], {z, z, z, z}; }", "r", loc, ip)
