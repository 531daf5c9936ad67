"""What the warps of a block found of a segment, merged, and where it goes."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.direct.rows import pieces
from tkq.attention.decode.output import Output, rows_of
from tkq.attention.decode.plan import FEW

INF = Float32.inf
LENGTH, PAGE = 1, 2  # bits of a fault
BARRIER, PADDING = 1, 4  # the padding of rows of O, in fp32: its stores go to other banks


class DirectOutput:
    def __init__(self, spec, config):
        self.spec, self.warps, self.dv = spec, config.warps, spec.head_dim_v
        self.threads, self.pitch = 32 * config.warps, spec.head_dim_v + PADDING
        self.output = Output(spec, self.threads)
        self.rows_of, self.refuse_others = rows_of, self.output.refuse_others

    def shared(self, al) -> tuple:
        return al.vector(self.warps * FEW * self.pitch), al.vector(2 * FEW, self.warps)

    @cute.jit
    def write(self, g, smem, regs, s):
        """O and the log-sum-exp of a segment."""
        self.give_sums(g, smem.sums, regs)
        tk.sync(BARRIER, self.threads)
        lse, whole, query = cute.make_rmem_tensor((2,), Float32), s.splits == 1, tk.lane_id() % 4 * 2
        for e in cutlass.range_constexpr(2):
            found, inverse, own = self.both(smem.sums, regs, query + e, e)
            if const_expr(self.spec.sinks is not None):
                weight, with_sink = self.output.with_sink(g, s, query + e, found)
                inverse = cutlass.select_(whole, inverse * weight, inverse)
                found = cutlass.select_(whole, with_sink, found)
            lse[e] = found
            self.give_o(smem.o, regs, query + e, (own * inverse, e))
        tk.sync(BARRIER, self.threads)
        here, fours = cutlass.min(Int32(FEW), s.queries * g.group), self.dv // 4
        slot = self.output.walk.slot(g, s, s.split)
        for item in cutlass.range(cute.arch.thread_idx()[0], here * fours, self.threads, unroll=1):
            row, column = item // fours, item % fours * 4
            total = self.total(smem.o, row, column)
            if whole:
                self.output.row(g, s, (row, column), total, Float32(1.0))
            else:
                at = g.partial.iterator + ((Int64(slot) * g.partial.shape[1] + row) * self.dv + column)
                cute.autovec_copy(total, cute.make_tensor(at.align(16), cute.make_layout(4)))
        self.give_lse(g, s, lse, (slot, query, here))
        if whole:
            pass
        else:
            if self.output.arrive(g, smem.ticket, s) == s.splits - 1:
                self.output.merge(g, s)

    @cute.jit
    def give_sums(self, g, sums, regs):
        """What the warp took from scores, and its sums; NaN where a page lied, or a length."""
        plan, warp, page = g.plan, tk.warp_id(), cute.arch.vote_any_sync((regs.fault[0] & PAGE) != 0)
        if page and tk.lane_id() == 0:
            plan[words.BAD_PAGE] = Int32(1)
        fault = cute.arch.vote_any_sync(regs.fault[0] != 0)
        for e in cutlass.range_constexpr(2):
            norm = regs.norm[e]
            for step in cutlass.range_constexpr(3):
                norm = norm + cute.arch.shuffle_sync_bfly(norm, offset=4 << step)
            if fault:
                norm = Float32.nan
            if tk.lane_id() < 4:
                sums[2 * tk.lane_id() + e, warp] = regs.max[e]
                sums[FEW + 2 * tk.lane_id() + e, warp] = norm

    def both(self, sums, regs, query, e):
        """(the log-sum-exp, base 2, of all warps; one over their sum, in the largest of their units; what this
        warp's part is multiplied by to be in that unit)."""
        tops = [sums[query, w] for w in range(self.warps)]
        top = tops[0]
        for x in tops[1:]:
            top = cute.arch.fmax(top, x)
        base, norm = cutlass.select_(top == -INF, Float32(0.0), top), Float32(0.0)
        for w, x in enumerate(tops):
            norm = cute.math.fma(cute.math.exp2(x - base, fastmath=True), sums[FEW + query, w], norm)
        none = norm == Float32(0.0)
        found = cutlass.select_(none, Float32(-INF), top + cute.math.log2(norm, fastmath=True))
        inverse = cutlass.select_(none, Float32(0.0), cute.arch.rcp_approx(norm))
        return found, inverse, cute.math.exp2(regs.max[e] - base, fastmath=True)

    def give_o(self, o, regs, query, by):
        """The warp's O of a query, times a factor and O's unit: fours of columns, as they came in words of V. by:
        factor, and which of the lane's queries."""
        factor, e = by
        row = o.iterator + (tk.warp_id() * FEW + query) * self.pitch
        for piece in pieces(self.dv, 8):
            for w in range(piece.bytes // 4):
                four = cute.make_rmem_tensor((4,), Float32)
                for c in range(4):
                    four[c] = regs.o[8 * (piece.word + w) + 2 * c + e] * factor * regs.of_v[0]
                at = row + (piece.first + piece.bytes * (tk.lane_id() // 4) + 4 * w)
                cute.autovec_copy(four, cute.make_tensor(at.align(16), cute.make_layout(4)))

    def total(self, o, row, column):
        """Four columns of a row, of all warps."""
        total = cute.make_rmem_tensor((4,), Float32)
        total.fill(0.0)
        for w in range(self.warps):
            four = cute.make_rmem_tensor((4,), Float32)
            at = (o.iterator + ((w * FEW + row) * self.pitch + column)).align(16)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(4)), four)
            for c in range(4):
                total[c] = total[c] + four[c]
        return total

    @cute.jit
    def give_lse(self, g, s, lse, at):
        """By four lanes of the first warp. at: slot, the lane's first query, how many queries there are."""
        (slot, query, here), out, parts = at, g.lse, g.partial_lse
        if cute.arch.thread_idx()[0] < 4:
            for e in cutlass.range_constexpr(2):
                row = query + e
                if row < here:
                    if s.splits != 1:
                        parts[slot, row] = lse[e]
                    else:
                        if const_expr(self.spec.lse):
                            out[s.place, s.head * g.group + row % g.group, s.row + row // g.group] = lse[e] * tk.LN2
