"""Products of groups, a tile's result written while the next tile's first products run."""
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

from .fp8_spread import SpreadFp8Gemm
from .grouped import GroupedGemm


class SpreadGroupedGemm(SpreadFp8Gemm, GroupedGemm):
    """GroupedGemm's tiles, written as SpreadFp8Gemm does. Each consumer has two cursors in the table of groups: of the
    tile that it multiplies, and of the one before, which it writes."""

    @cute.jit
    def one_tile(self, g, s: Constexpr, u: Constexpr, h: Constexpr, t, last, number, wg):
        if const_expr(self.along_k):
            super().one_tile(g, s, u, h, t, last, number, wg)
        else:
            if self.has_rows(t, wg):
                super().one_tile(g, s, u, h, t, last, number, wg)
            else:
                if number >= last.workers():
                    self.write_held(g, s, h, self.tile(g, s, last, number - last.workers()), wg)
                self.let_go(g, s, u, t)
