"""Scales of float8 caches: what the consumer multiplies scores, exponentials and O by."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode.copies import load_f32x2

FP32_BIAS, FP32_MANTISSA = 127, 23
# A row of q is scaled to a largest element of 2^13 .. 2^14, by powers of two: what fp16 loses of its small ones is
# below 2^-38 of the largest.
TOP, LOW, HIGH = 13, 14, 254  # the last two: exponents of the largest element, such that both factors are normal
SMALLEST = 2.0**-126
# Exponentials are 2^15 at most, and not 1: fp16 then has those of 2^-29 of a row's largest with all their bits. Where
# the largest meet values of 0, the others are all that O is made of.
PEAK = 15.0


class Scaling:
    """A cache's number times its scale is meant. Scales of a head go into the factor of scores, and of O. Those of a
    token multiply its scores and, divided by the largest that there was, its exponentials: ``of_v`` is that largest."""

    def __init__(self, spec, config):
        self.spec, self.config = spec, config

    @cute.jit
    def begin(self, g, regs, s):
        """What a segment starts with: after `narrowed`, which finds the rows' own factors."""
        regs.of_v[0] = Float32(SMALLEST if self.spec.scales == "token" else 1.0)
        factor, of_k = g.cap if const_expr(self.spec.softcap) else g.scale, Float32(1.0)
        if const_expr(self.spec.scales == "head"):
            regs.of_v[0], of_k = g.v_descale[s.head], g.k_descale[s.head]
        elif const_expr(self.spec.scales == "sequence"):
            regs.of_v[0], of_k = g.v_descale[s.source, s.head], g.k_descale[s.source, s.head]
        if const_expr(self.spec.scales in ("head", "sequence")):
            # Those of a sequence of no key mean nothing, and may be NaN: 0 * NaN would be NaN.
            some = s.length > 0
            regs.of_v[0], of_k = (cutlass.select_(some, x, Float32(1.0)) for x in (regs.of_v[0], of_k))
        for r in cutlass.range_constexpr(2):
            # Never 0: -inf of a key that is not seen stays -inf.
            both = regs.scale.tensor[r] * factor * of_k
            regs.scale.tensor[r] = cute.arch.fmax(both, Float32(SMALLEST), nan=True)

    def narrowed(self, q, regs):
        """q, as fp16, its rows times powers of two, whose reciprocals become regs.scale."""
        view, tops = q.rows_view, [Float32(0.0), Float32(0.0)]
        columns = q.cols // 4
        result = tk.rt(q.cols, cutlass.Float16)
        for r in range(2):
            for j in range(columns):
                x = Float32(view[r, j])
                tops[r] = cute.arch.fmax(tops[r], cute.arch.fmax(x, -x))
            for lane in (1, 2):
                tops[r] = cute.arch.fmax(tops[r], cute.arch.shuffle_sync_bfly(tops[r], offset=lane))
            factor, regs.scale.tensor[r] = self.of_row(tops[r])
            for j in range(columns):
                result.rows_view[r, j] = cutlass.Float16(Float32(view[r, j]) * factor)
        return result

    def of_row(self, top):
        """(power of two that a row of q is multiplied by, its reciprocal), from the row's largest element."""
        exponent = cutlass.min(cutlass.max(top.bitcast(Int32) >> FP32_MANTISSA, Int32(LOW)), Int32(HIGH))
        factor = ((2 * FP32_BIAS + TOP - exponent) << FP32_MANTISSA).bitcast(Float32)
        return factor, ((exponent - TOP) << FP32_MANTISSA).bitcast(Float32)

    def base(self, top):
        """What is taken from scores, of which top is the largest; all base 2."""
        base = top - PEAK
        # Of large scores the difference may be rounded, and fp16 ends below 2^16.
        return cutlass.select_(top - base > PEAK, top, base)

    def keys(self, smem, regs, stage):
        """Scores, times their keys' scales."""
        self.columns(regs.s, smem.scales, stage, 0, Float32(1.0))

    def values(self, smem, regs, stage):
        """Exponentials, times their values' scales; did the largest scale grow?"""
        before, top = regs.of_v[0], regs.of_v[0]
        for warp in range(4):
            top = cute.arch.fmax(top, smem.scales[2 * self.config.keys + warp, stage])
        inverse = cute.arch.rcp_approx(top)
        self.columns(regs.s, smem.scales, stage, self.config.keys, inverse)
        regs.of_v[0] = top
        grown = top > before
        # Exactly 1 where it did not: another row's maximum may have moved, which must not change this row's bits.
        tk.mul(regs.correct, regs.correct, Float32(cutlass.select_(grown, before * inverse, Float32(1.0))))
        return grown

    def columns(self, tile, scales, stage, first, factor):
        view = tile.rows_view
        at = Int32(scales.iterator.toint()) + (stage * (2 * self.config.keys + 4) + tk.first_col()) * 4
        for j in range(0, self.config.keys // 4, 2):
            for i, by in enumerate(load_f32x2(at, 4 * (4 * j + first))):
                for r in range(2):
                    view[r, j + i] = view[r, j + i] * (by * factor)
