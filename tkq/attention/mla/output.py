"""Where a segment's result goes: into the task's, or into a part's slot."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.decode.plan import ROWS
from tkq.attention.mla.spec import HEAD_DIM_V
from tkq.attention.mla.state import HALF
from tkq.attention.mla.tiles import length_of, place_in_slot, place_of, rows_of, sparse

INF = Float32.inf
ALL = 3 * tk.WARPGROUP
Q_IS_THERE, INVERSE_IS_THERE, INVERSE_IS_READ = 1, 2, 3  # barriers


class Output:
    def __init__(self, spec, config):
        self.spec, self.config = spec, config

    @cute.jit
    def scores(self, g, smem, regs, s):
        """From the warpgroup of the scores: the log-sum-exp, and for the others the factors of O's rows; norm is the
        sum over the row."""
        lse, fault = tk.rv(), cutlass.select_(s.length == length_of(g, s), Int32(0), Int32(1))
        fault = cutlass.select_(s.inside != 0, fault, Int32(1))
        for w in cutlass.range_constexpr(4):
            fault = fault | smem.faults[w, regs.segment.stage]
        for r in cutlass.range_constexpr(2):
            norm, top = regs.norm.tensor[r], regs.max.tensor[r]
            if fault != 0:
                norm = Float32.nan
            lse.tensor[r] = Float32(-INF) if norm == Float32(0.0) else top + cute.math.log2(norm, fastmath=True)
            regs.norm.tensor[r] = Float32(0.0) if norm == Float32(0.0) else cute.arch.rcp_approx(norm)
        tk.sync(INVERSE_IS_READ, ALL)  # that of the segment before
        tk.store_rows(smem.inverse[None, 0], regs.norm, 0, ROWS)
        tk.sync_arrive(INVERSE_IS_THERE, ALL)  # and on to the next segment, whatever the others still have to do
        if s.splits == 1:
            self.lse_of_whole(g, lse, s)
        else:
            self.lse_of_part(g, lse, s)

    @cute.jit
    def values(self, g, smem, regs, s, column: cutlass.Constexpr[int]):
        """Half of O's columns, from ``column`` on."""
        tk.sync(INVERSE_IS_THERE, ALL)
        for r in cutlass.range_constexpr(2):
            regs.correct.tensor[r] = smem.inverse[tk.first_row() + 8 * r, 0]
        tk.sync_arrive(INVERSE_IS_READ, ALL)
        for i in cutlass.range_constexpr(2):
            self.columns(g, regs.o[i], regs.correct, s, column + i * (HALF // 2))

    @cute.jit
    def columns(self, g, o, inverse, s, column: cutlass.Constexpr[int]):
        """Columns of O from ``column`` on, times its rows' factors: the result, or a part's in its slot, in fp32."""
        if s.splits == 1:
            tk.mul_row(o, o, inverse)
            self.whole(g, o, s, column)
        else:
            (first, rows), view = place_in_slot(g, s.slot), o.rows_view
            here = cutlass.min(rows, g.queries * g.group - s.tile * ROWS)
            for r in cutlass.range_constexpr(2):
                row = tk.first_row() + 8 * r
                if row < here:
                    for place, columns in self.places(g, first + row, o.cols, column):
                        some = cute.make_rmem_tensor((len(columns),), Float32)
                        for e, j in enumerate(columns):
                            some[e] = view[r, j] * inverse.tensor[r]
                        cute.autovec_copy(some, place)

    def places(self, g, row, columns, column):
        """Of a thread's columns, from ``column`` on, of a row of all slots: where some of them lie beside each other,
        and which they are. See MlaConfig, partials_in_fragments: columns 8 j and on, and 8 (j + 1)."""
        at = g.partial.iterator + (row * HEAD_DIM_V + column)
        each = 4 if self.config.partials_in_fragments else 2
        return [(cute.make_tensor((at + (8 * j + tk.first_col() * (each // 2))).align(4 * each),
                                  cute.make_layout(each)), range(2 * j, 2 * j + each))
                for j in range(0, columns // 8, each // 2)]

    def whole(self, g, o, s, column):
        rows = rows_of(g.o, g, s)
        to = cute.make_tensor((rows.iterator + column).align(16),
                              cute.make_layout((rows.shape[0], o.cols), stride=(rows.stride[0], 1)))
        tk.store_narrow(to, o, s.tile * ROWS, g.queries * g.group)

    @cute.jit
    def lse_of_part(self, g, lse, s):
        first, rows = place_in_slot(g, s.slot)
        here = cutlass.min(rows, g.queries * g.group - s.tile * ROWS)
        tk.store_rows(cute.make_tensor(g.partial_lse.iterator + first, cute.make_layout(rows)), lse, 0, here)

    @cute.jit
    def lse_of_whole(self, g, lse, s):
        if const_expr(self.spec.lse):
            tk.mul(lse, lse, tk.LN2)
            batch, head, query = g.lse.stride
            sequence, first = place_of(g, s)
            at = g.lse.iterator + Int64(sequence) * batch
            if const_expr(sparse(g)):
                at = at + Int64(first) * query
            rows = cute.make_tensor(at, cute.make_layout(((g.group, g.queries),), stride=((head, query),)))
            tk.store_rows(rows, lse, s.tile * ROWS, g.queries * g.group)
