"""The mainloop of the float8 GEMM that sums all of K on the tensor cores."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

from ... import tile as tk
from .config import Fp8Config, prefetches_scales
from .matrices import load_row_scales
from .spec import Fp8Spec


class Mainloop:
    """Sums of all of K, scaled at the end: for each step, wait for its stage, wgmma, release the stage before."""

    def __init__(self, spec: Fp8Spec, config: Fp8Config, operands):
        self.spec, self.config, self.operands = spec, config, operands

    @cute.jit
    def sum(self, g, s: Constexpr, u: Constexpr, t, wg):
        """A consumer whose rows all lie past its group's end only lets the stages go: small groups leave half of a
        tile to it, and what it does not multiply costs no energy and no time of the other's."""
        self.operands.begin(u, t)
        if const_expr(self.operands.always_rows):
            self.sum_products(g, s, u, t, wg)
        else:
            if self.operands.has_rows(t, wg):
                self.sum_products(g, s, u, t, wg)
            else:
                self.let_go(g, s, u, t)

    @cute.jit
    def let_go(self, g, s: Constexpr, u: Constexpr, t):
        for _ in cutlass.range(self.operands.steps(g, t), unroll=1):
            s.pipe.wait(u.full)
            u.full.advance()
            self.release(s, u)

    @cute.jit
    def sum_products(self, g, s: Constexpr, u: Constexpr, t, wg):
        x = self.config
        self.multiply(s, u, self.operands.mm, wg)
        if const_expr(prefetches_scales(self.spec, x)):  # under the first product
            load_row_scales(self.operands, g, u, t, wg)
            tk.load_cols(u.cols, self.operands.column_scales(g, t), t.col * x.n, g.n)
        if const_expr(x.wgmma_in_flight == 0):
            tk.mma_wait(0)
            self.release(s, u)
        for _ in cutlass.range(1, self.operands.steps(g, t), unroll=1):
            self.multiply(s, u, self.operands.mma, wg)
            tk.mma_wait(x.m_subtiles * x.wgmma_in_flight)
            self.release(s, u)
        if const_expr(x.wgmma_in_flight > 0):
            tk.mma_wait(0)
            self.release(s, u)

    def multiply(self, s, u, product, wg):
        """Issue one step of K."""
        x = self.config
        self.operands.ready(s, u, wg)
        for w in range(x.m_subtiles):
            self.operands.multiply(product, u.acc[w], s, u.full, w, wg)
        u.full.advance()

    def release(self, s, u):
        s.pipe.release(u.done)
        u.done.advance()

    def next_step(self, s, u, wg):
        """Retire a K step and issue the next."""
        tk.mma_wait(0)
        self.release(s, u)
        self.multiply(s, u, self.operands.mma, wg)
