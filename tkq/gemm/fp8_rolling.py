"""C = A @ B in float8, scaled by blocks, a product in flight while the one before is promoted."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr

from .. import tile as tk
from .fp8 import Fp8Gemm


class RollingFp8Gemm(Fp8Gemm):
    """As Fp8Gemm, of promoted sums; a step of K is two halves, x and y, waves or parts of columns:

      tensor cores  |x0      |y0      |x1      |y1      |x2 ..
      FFMA                   |promote x0|promote y0|promote x1| ..

    x of the next step is issued before y is promoted, ``rolling`` steps long; then nothing is in flight, as the
    assembler follows what is only as far as a loop's end. The stage goes when y has come out.
    """

    @cute.jit
    def sum_promoted(self, g, s: Constexpr, u: Constexpr, t, wg):
        x, steps = self.config, self.steps(g, t)
        for acc in u.acc:
            tk.zero(acc)
        part, rows = [tk.rt_fl(x.part) for _ in range(2)], [tk.rv() for _ in range(2)]
        for _ in cutlass.range(steps // x.rolling, unroll=1):
            self.roll(s, u, part, rows, wg, x.rolling)
        for _ in cutlass.range(steps % x.rolling, unroll=1):
            self.roll(s, u, part, rows, wg, 1)

    def roll(self, s, u, part, rows, wg, steps):
        """So many steps of K."""
        self.ready(s, u, wg)
        self.start(s, u, part[0], 0, wg)
        for i in range(steps):
            scales = self.second(s, u, part, rows, wg)
            u.full.advance()
            if i + 1 < steps:
                self.ready(s, u, wg)
                self.start(s, u, part[0], 0, wg)
            tk.mma_wait(1 if i + 1 < steps else 0)
            self.release(s, u)
            self.promote(u.acc[1], part[1], rows[1], scales)

    def second(self, s, u, part, rows, wg):
        """Issue the second half and promote the first; the second one's columns' scales."""
        self.start(s, u, part[1], 1, wg)
        scales = [self.scales_of(s, u.full, row, i, wg) for i, row in enumerate(rows)]
        if self.config.waves == 1:
            for h in range(2):
                rows[1].tensor[h] = rows[0].tensor[h]
        tk.mma_wait(1)
        self.promote(u.acc[0], part[0], rows[0], scales[0])
        return scales[1]
