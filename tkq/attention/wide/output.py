"""An output warpgroup of attention with wide heads: its part of O's columns."""
import cutlass
import cutlass.cute as cute
from cutlass import const_expr

import tkq.tile as tk
from tkq.attention.forward.state import Fields, field_names
from tkq.attention.wide.config import PARTS
from tkq.attention.wide.products import release_before, skip, take_task
from tkq.attention.wide.scores import rows_of
from tkq.attention.wide.state import OutputState


class Output:
    def __init__(self, spec, config, fields=None):
        """fields: of a task; attention's own where not given."""
        self.spec, self.config, self.fields = spec, config, fields or field_names(spec)
        self.tiles, self.cols = config.value_tiles(spec.head_dim), config.value_cols

    def state(self, smem, part):
        return OutputState(o=tuple(tk.rt_fl(self.cols) for _ in range(self.tiles)), factor=tk.rv(),
                           task=Fields.new(self.fields), ring=smem.v_pipe.ring(), q=tk.ring(1),
                           p_ring=smem.p_pipe.ring(), end=smem.end_pipe.ring(), part=part)

    @cute.jit
    def run(self, g, smem, part):
        regs = self.state(smem, part)
        regs.ring.count[0] = regs.ring.count[0] + cutlass.Uint32(part)
        blocks = self.next_task(smem, regs)
        while blocks > 0:
            self.begin(regs)
            self.steps(smem, regs, blocks)
            self.finish(g, smem, regs)
            blocks = self.next_task(smem, regs)

    def begin(self, regs):
        for o in regs.o:
            tk.zero(o)

    @cute.jit
    def next_task(self, smem, regs):
        """Wait for the next task. How many blocks it has: none, and all is done."""
        blocks = take_task(smem, regs.q, regs.task)
        cute.arch.sync_warp()
        tk.arrive(smem.q_empty)
        return blocks

    @cute.jit
    def steps(self, smem, regs, blocks):
        """O += P @ V, block by block of the visit. In the ring a block's V is behind the next block's K."""
        keys = self.config.key_slots(self.spec.head_dim)
        skip(regs.ring, keys)
        for i in cutlass.range(blocks, unroll=1):
            skip(regs.ring, cutlass.select_(i + 1 < blocks, cutlass.Uint32(keys), cutlass.Uint32(0)))
            self.step(smem, regs)

    @cute.jit
    def step(self, smem, regs):
        smem.p_pipe.wait(regs.p_ring)
        self.correct_if(smem, regs)
        for i in cutlass.range_constexpr(self.tiles * self.config.key_parts):
            smem.v_pipe.wait(regs.ring)
            o, p = regs.o[i // self.config.key_parts], smem.p[i % self.config.key_parts]
            tk.mma_AB(o, p, smem.v[regs.ring.stage])
            if const_expr(i > 0):
                tk.mma_wait(1)
                release_before(smem.v_pipe, regs.ring, PARTS)
            skip(regs.ring, PARTS)
        tk.mma_wait(0)
        release_before(smem.v_pipe, regs.ring, PARTS)
        smem.p_pipe.release(regs.p_ring)
        regs.p_ring.advance()

    @cute.jit
    def correct_if(self, smem, regs):
        """O so far, after the running maximum of a row of the warp's has moved."""
        if cute.arch.make_warp_uniform(smem.moved[tk.warp_id() % 4]) != 0:
            self.load_factors(smem, regs, 0)
            self.scale(regs)

    def scale(self, regs):
        for o in regs.o:
            tk.mul_row(o, o, regs.factor)

    def load_factors(self, smem, regs, column):
        for r in range(2):
            regs.factor.tensor[r] = smem.factors[tk.first_row() + 8 * r, column]

    @cute.jit
    def finish(self, g, smem, regs):
        """Divide by the norm, and write this part of O from registers."""
        t = regs.task
        smem.end_pipe.wait(regs.end)
        self.load_factors(smem, regs, 1)
        cute.arch.sync_warp()
        smem.end_pipe.release(regs.end)
        regs.end.advance()
        self.scale(regs)
        first, end = rows_of(self.spec, g, t)
        o = g.o[None, None, t["head"]] if self.spec.varlen else g.o[None, None, t["head"], t["batch"]]
        for i in cutlass.range_constexpr(self.tiles):
            columns = self.columns_from(o, (regs.part * self.tiles + i) * self.cols)
            tk.store_narrow(columns, regs.o[i], first + t["tile"] * self.config.rows, end)

    def columns_from(self, o, first):
        """Of (row, col)."""
        (rows, cols), (row, col) = o.shape, o.stride
        return cute.make_tensor(o.iterator + first, cute.make_layout((rows, cols - first), stride=(row, col)))
