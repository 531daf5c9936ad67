"""The mainloops of the float8 GEMM that promote: sums of 128 of K, scaled, are added up in fp32 registers."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

from ... import tile as tk
from .config import Fp8Config
from .epilogue import fma_scaled
from .matrices import rows_of
from .spec import Fp8Spec


class PromotedStep:
    """A step of K in m_subtiles x split parts: the product of each, and its promotion."""

    def __init__(self, spec: Fp8Spec, config: Fp8Config):
        self.spec, self.config = spec, config

    def start(self, s, u, part, i, wg):
        """Issue the product of wave i // split and part i % split of this step."""
        split = self.config.split
        tk.mm_ABt(part, rows_of(self.config, s, u.full, i // split, wg), s.b[u.full.stage * split + i % split])

    def scales_of(self, s, r, row, i, wg):
        """The rows' scales of a stage into ``row``; returns the columns': numbers, or where they lie."""
        x = self.config
        if not self.spec.per_step:
            return None
        here = s.scales[None, r.stage]
        if i % x.split == 0:
            for h in range(2):
                row.tensor[h] = here[64 * (wg * x.m_subtiles + i // x.split) + tk.first_row() + 8 * h]
        first = x.m + i % x.split * x.part
        if self.spec.scale_b == "1x128":
            return cute.make_tensor(here.iterator + first, cute.make_layout(x.part))
        first = x.m + i % x.split * (x.part // x.chunk)
        return [here[first + j] for j in range(x.part // x.chunk)]

    def promote(self, acc, part, row, scales):
        if self.spec.scale_b == "128x128":
            tk.fma_outer(acc, part, row, scales)
        elif self.spec.scale_b == "1x128":
            fma_scaled(acc, part, row, scales)
        else:
            tk.add(acc, acc, part)


class Promotion:
    """For each step and part: wgmma from zero; its scales meet in registers under it; what came out, scaled, is added
    to the sums."""

    def __init__(self, spec: Fp8Spec, config: Fp8Config, operands):
        self.spec, self.config, self.operands, self.step = spec, config, operands, PromotedStep(spec, config)

    @cute.jit
    def sum(self, g, s: Constexpr, u: Constexpr, t, wg):
        x = self.config
        self.operands.begin(u, t)
        for acc in u.acc:
            tk.zero(acc)
        part, row = tk.rt_fl(x.part), tk.rv()
        n = x.m_subtiles * x.split
        for _ in cutlass.range(self.operands.steps(g, t), unroll=1):
            self.operands.ready(s, u, wg)
            for i in cutlass.range_constexpr(n):
                self.step.start(s, u, part, i, wg)
                scales = self.step.scales_of(s, u.full, row, i, wg)
                tk.mma_wait(0)
                if const_expr(i == n - 1 and self.spec.scale_b != "1x128"):
                    s.pipe.release(u.full)
                self.step.promote(u.acc[i], part, row, scales)
            if const_expr(self.spec.scale_b == "1x128"):  # its scales are read until the end
                s.pipe.release(u.full)
            u.full.advance()


class PipelinedPromotion:
    """As ``Promotion``, with a product in flight while the one before is promoted. For 128x128 scales of b. A step of K
    is two halves, x and y, or four quarters: subtiles of rows, or parts of columns:

      tensor cores  |x0      |y0      |x1      |y1      |x2 ..
      FFMA                   |promote x0|promote y0|promote x1| ..

    x of the next step is issued before y is promoted, ``promotion_unroll`` steps long; then nothing is in flight, as
    the assembler follows what is only as far as a loop's end. The stage goes when y has come out.
    """

    def __init__(self, spec: Fp8Spec, config: Fp8Config, operands):
        self.spec, self.config, self.operands, self.step = spec, config, operands, PromotedStep(spec, config)

    @cute.jit
    def sum(self, g, s: Constexpr, u: Constexpr, t, wg):
        x, steps = self.config, self.operands.steps(g, t)
        for acc in u.acc:
            tk.zero(acc)
        part, rows = [tk.rt_fl(x.part) for _ in range(2)], [tk.rv() for _ in range(x.m_subtiles)]
        self.promote_remaining(s, u, part, rows, wg, steps)

    @cute.jit
    def promote_remaining(self, s: Constexpr, u: Constexpr, part: Constexpr, rows: Constexpr, wg, steps):
        """So many more steps."""
        promotion_unroll = self.config.promotion_unroll
        for _ in cutlass.range(steps // promotion_unroll, unroll=1):
            self.promote_steps(s, u, part, rows, wg, promotion_unroll)
        for _ in cutlass.range(steps % promotion_unroll, unroll=1):
            self.promote_steps(s, u, part, rows, wg, 1)

    def promote_steps(self, s, u, part, rows, wg, steps, under=None):
        """So many steps of K. A step's scales are read before its first part is promoted; under(i): what else is done
        before part i is."""
        x = self.config
        n = x.m_subtiles * x.split
        self.operands.ready(s, u, wg)
        self.step.start(s, u, part[0], 0, wg)
        for i in range(steps * n):  # promote i, while i + 1 is multiplied
            p, more = i % n, i + 1 < steps * n
            first = under is not None and i == 0 and x.stores_before_product(self.spec.out)
            if first:
                under(i)
            if p == n - 1:
                u.full.advance()
                if more:
                    self.operands.ready(s, u, wg)
            if more:
                self.step.start(s, u, part[(i + 1) % 2], (p + 1) % n, wg)
            if p == 0:
                scales = [self.step.scales_of(s, u.full, rows[q // x.split], q, wg) for q in range(n)]
            if under is not None and not first:
                under(i)
            tk.mma_wait(1 if more else 0)
            if p == n - 1:
                s.pipe.release(u.done)
                u.done.advance()
            self.step.promote(u.acc[p], part[i % 2], rows[p // x.split], scales[p])
