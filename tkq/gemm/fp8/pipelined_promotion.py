"""C = A @ B in float8, 1x128 and 128x128 scales, with a pipelined promotion: a product is in flight while the one
before is promoted."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr

from ... import tile as tk
from .kernel import Fp8Gemm


class PipelinedPromotionFp8Gemm(Fp8Gemm):
    """As Fp8Gemm, of promoted sums; a step of K is two halves, x and y, or four quarters: waves, or parts of columns:

      tensor cores  |x0      |y0      |x1      |y1      |x2 ..
      FFMA                   |promote x0|promote y0|promote x1| ..

    x of the next step is issued before y is promoted, ``promotion_unroll`` steps long; then nothing is in flight, as
    the assembler follows what is only as far as a loop's end. The stage goes when y has come out.
    """

    @cute.jit
    def sum_promoted(self, g, s: Constexpr, u: Constexpr, t, wg):
        x, steps = self.config, self.steps(g, t)
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
        self.ready(s, u, wg)
        self.start(s, u, part[0], 0, wg)
        for i in range(steps * n):  # promote i, while i + 1 is multiplied
            p, more = i % n, i + 1 < steps * n
            first = under is not None and i == 0 and x.stores_before_product(self.spec.out)
            if first:
                under(i)
            if p == n - 1:
                u.full.advance()
                if more:
                    self.ready(s, u, wg)
            if more:
                self.start(s, u, part[(i + 1) % 2], (p + 1) % n, wg)
            if p == 0:
                scales = [self.scales_of(s, u.full, rows[q // x.split], q, wg) for q in range(n)]
            if under is not None and not first:
                under(i)
            tk.mma_wait(1 if more else 0)
            if p == n - 1:
                self.release(s, u)
            self.promote(u.acc[p], part[i % 2], rows[p // x.split], scales[p])
