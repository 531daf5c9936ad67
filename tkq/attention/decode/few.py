"""The softmax of up to 8 packed queries, which are one row of each thread of the first consumer warp."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode.copies import pack_f16x2
from tkq.attention.decode.scaling import Scaling

INF = Float32.inf


class FewRows:
    """As the consumer's own, for the rows that there are: the other warps, and other rows, have P of zeros. It comes in
    two halves, so that P @ V of the block before lies under the first: P is not written to before it is read."""

    def __init__(self, spec, config):
        self.spec, self.config, self.scaling = spec, config, Scaling(spec, config)

    def active(self):
        """Has the warp any of the rows?"""
        return tk.warp_id() % 4 == 0

    @cute.jit
    def exponentials(self, g, smem, regs, there, block):
        """S becomes exponentials; correct: what came before is to be multiplied by it. moved: is it another than 1?"""
        stage, view, count, moved = regs.k.stage, regs.s.rows_view, self.config.keys // 4, regs.moved
        best, norm, correction = regs.max.tensor, regs.norm.tensor, regs.correct.tensor
        moved[0] = Int32(0)
        if self.active():
            factor = regs.scale.tensor[0]
            if const_expr(self.spec.scales == "token"):
                self.scaling.columns(regs.s, smem.scales, stage, 0, Float32(1.0), rows=1)
            if const_expr(self.spec.softcap):
                for j in cutlass.range_constexpr(count):
                    view[0, j] = cute.math.tanh(view[0, j] * factor, fastmath=True)
                factor = g.scale
            self.mask(regs, there, block)
            tops = [view[0, 0], view[0, 1]]
            for j in cutlass.range_constexpr(2, count):
                tops[j % 2] = cute.arch.fmax(tops[j % 2], view[0, j])
            top = cute.arch.fmax(*tops)
            for step in cutlass.range_constexpr(2):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 + step))
            before = best[0]
            top = cute.arch.fmax(before, top * factor)
            base = cutlass.select_(top == -INF, Float32(0.0), top)
            correct = cute.math.exp2(before - base, fastmath=True)
            sums = [Float32(0.0), Float32(0.0)]
            for j in cutlass.range_constexpr(count):
                view[0, j] = cute.math.exp2(cute.math.fma(view[0, j], factor, -base), fastmath=True)
                sums[j % 2] = sums[j % 2] + view[0, j]
            norm[0] = cute.math.fma(norm[0], correct, sums[0] + sums[1])
            best[0] = top
            correction[0] = correct
            other = top > before
            if const_expr(self.spec.scales == "token"):
                other = other | self.scaling.values(smem, regs, stage, rows=1)
            moved[0] = Int32(cute.arch.vote_any_sync(other))

    @cute.jit
    def mask(self, regs, there, block):
        """Scores of keys that are not there, or that the row does not see, become -inf."""
        view, rows = regs.s.rows_view, self.config.rows_per_warp
        all_there = Int32((1 << rows) - 1 if rows < 32 else -1)
        if (there[0] & there[1] & there[2] & there[3]) != all_there:
            own = [word >> tk.first_col() for word in there]
            for j in cutlass.range_constexpr(self.config.keys // 4):
                key = 8 * (j // 2) + j % 2
                if own[key // rows] & Int32(1 << key % rows) == 0:
                    view[0, j] = -INF
        if const_expr(self.spec.edges):
            begin = block * self.config.keys
            if begin < regs.first[2] or begin + self.config.keys > regs.end[2]:
                first, end = regs.first[0] - begin - tk.first_col(), regs.end[0] - begin - tk.first_col()
                for j in cutlass.range_constexpr(self.config.keys // 4):
                    key = 8 * (j // 2) + j % 2
                    if key < first or key >= end:
                        view[0, j] = -INF

    @cute.jit
    def weights(self, regs):
        """P, and O of the blocks before in its unit."""
        if self.active():
            s, words = regs.s.tensor, cute.recast_tensor(regs.p.tensor, Int32)
            for m in cutlass.range_constexpr(self.config.keys // 8):
                words[2 * m] = pack_f16x2(s[4 * m], s[4 * m + 1])
            if regs.moved[0] != 0:
                view = regs.o.rows_view
                for j in cutlass.range_constexpr(regs.o.cols // 4):
                    view[0, j] = view[0, j] * regs.correct.tensor[0]
