"""Where the consumers' queries come from, and where a segment's result goes."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.decode.output import rows_of
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.walk import Walk
from tkq.attention.mla.spec import HEAD_DIM_V
from tkq.attention.mla_two.copies import GROUPS, WARP_ROWS, copy_panels, row_of
from tkq.attention.mla_two.state import HALF
from tkq.attention.mla_two.tiles import place_in_slot

INF = Float32.inf
BOTH = 2 * tk.WARPGROUP
QUERIES, RESULT = 1, 2  # barriers of both warpgroups


@cute.jit
def load_q(g, s, tiles: cutlass.Constexpr):
    """The task's packed queries, zeros behind the last; tiles: (tile, first panel, panels). A warpgroup together; then
    both go on. Of the segment before both have read all: they met at RESULT."""
    x, addresses = rows_of(g.q, g, s), []
    for i in cutlass.range_constexpr(GROUPS):
        row = s.tile * ROWS + tk.warp_id() % 4 * WARP_ROWS + row_of(i)
        at = x.iterator.toint() + Int64(cute.crd2idx((row, 0), x.layout)) * 2
        addresses.append(cutlass.select_(row < g.queries * g.group, at, Int64(0)))
    for tile, first, panels in tiles:
        copy_panels(tile, 0, addresses, first, panels)
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    tk.publish()
    tk.sync(QUERIES, BOTH)


class Output:
    def __init__(self, spec):
        self.spec, self.walk = spec, Walk(spec)

    @cute.jit
    def scores(self, g, smem, regs, s):
        """The left half of O, and the log-sum-exp; norm is the sum over the row."""
        lse = tk.rv()
        for r in cutlass.range_constexpr(2):
            norm, top = regs.norm.tensor[r], regs.max.tensor[r]
            if regs.fault[0] != 0:
                norm = Float32.nan
            lse.tensor[r] = Float32(-INF) if norm == Float32(0.0) else top + cute.math.log2(norm, fastmath=True)
            regs.norm.tensor[r] = Float32(0.0) if norm == Float32(0.0) else cute.arch.rcp_approx(norm)
        tk.store_rows(smem.inverse[None, 0], regs.norm, 0, ROWS)
        tk.sync(RESULT, BOTH)
        self.half(g, regs.o, regs.norm, s, 0)
        self.log_sum(g, lse, s)

    @cute.jit
    def values(self, g, smem, regs, s):
        """The right half of O."""
        tk.sync(RESULT, BOTH)
        for r in cutlass.range_constexpr(2):
            regs.correct.tensor[r] = smem.inverse[tk.first_row() + 8 * r, 0]
        self.half(g, regs.o, regs.correct, s, HALF)

    @cute.jit
    def half(self, g, o, inverse, s, column: cutlass.Constexpr[int]):
        """Columns of O from ``column`` on: the result, or a split's in its slot, in fp32."""
        tk.mul_row(o, o, inverse)
        if s.splits == 1:
            rows = rows_of(g.o, g, s)
            to = cute.make_tensor((rows.iterator + column).align(16),
                                  cute.make_layout((rows.shape[0], HALF), stride=(rows.stride[0], 1)))
            tk.store_narrow(to, o, s.tile * ROWS, g.queries * g.group)
        else:
            (first, rows), view = place_in_slot(g, self.walk.slot(g, s, s.split)), o.rows_view
            here = cutlass.min(rows, g.queries * g.group - s.tile * ROWS)
            for r in cutlass.range_constexpr(2):
                row = tk.first_row() + 8 * r
                if row < here:
                    at = g.partial.iterator + ((first + row) * HEAD_DIM_V + column)
                    for j in cutlass.range_constexpr(HALF // 8):
                        two = cute.make_rmem_tensor((2,), Float32)
                        two[0] = view[r, 2 * j]
                        two[1] = view[r, 2 * j + 1]
                        to = (at + (8 * j + tk.first_col())).align(8)
                        cute.autovec_copy(two, cute.make_tensor(to, cute.make_layout(2)))

    @cute.jit
    def log_sum(self, g, lse, s):
        if s.splits > 1:
            first, rows = place_in_slot(g, self.walk.slot(g, s, s.split))
            at = g.partial_lse.iterator + first
            here = cutlass.min(rows, g.queries * g.group - s.tile * ROWS)
            tk.store_rows(cute.make_tensor(at, cute.make_layout(rows)), lse, 0, here)
        else:
            if const_expr(self.spec.lse):
                tk.mul(lse, lse, tk.LN2)
                batch, head, query = g.lse.stride
                at = g.lse.iterator + Int64(s.batch) * batch
                rows = cute.make_tensor(at, cute.make_layout(((g.group, g.queries),), stride=((head, query),)))
                tk.store_rows(rows, lse, s.tile * ROWS, g.queries * g.group)
