"""The producer of a GEMM: one warp that fills the stages of the block's tiles. For the 16-bit, the float8 and the
grouped GEMM."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr


class Producer:
    """Stages of the block's tiles, one after the other, as they come free.

    operands: what is loaded. ``order(g, s)``: the numbers of this block's tiles; ``tile(g, s, order, number)``: where
    one lies; ``steps(g, tile)``: of K; ``load_stage(g, s, tile, k, ring)``: acquire a stage and load step k into it."""

    def __init__(self, operands):
        self.operands = operands

    @cute.jit
    def produce(self, g, s: Constexpr):
        order, r = self.operands.order(g, s), s.pipe.ring()
        number = order.first()
        while number < order.tasks:
            t = self.operands.tile(g, s, order, number)
            for k in cutlass.range(self.operands.steps(g, t), unroll=1):
                self.operands.load_stage(g, s, t, k, r)
                r.advance()
            number = order.following(number)
