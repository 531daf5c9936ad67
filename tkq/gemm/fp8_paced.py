"""The float8 GEMM for many rounds of long tiles, whose blocks keep pace."""
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from .. import tile as tk
from . import fp8
from .fp8_config import STEP
from .fp8_rolling import RollingFp8Gemm
from .fp8_spec import GROUP, Fp8Spec
from .fp8_spread import SpreadFp8Gemm
from .fp8_state import Globals, transposed, vector
from .pace import Pace
from .paced_config import PacedFp8Config


@dataclass(frozen=True)
class PacedGlobals(Globals):
    counter: Int64  # its address


class PacedFp8(Pace):
    """In front of an Fp8Gemm: its producer waits for the other blocks' once in each round of tiles, see ``Pace``. The
    counter is an argument of its own."""

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale_a: tuple, scale_b: tuple, bias: Int64,
                 out_scale: Int64, blocks: Int32, counter: Int64, stream: cuda.CUstream):
        x, spec = self.config, self.spec
        m, n, steps = c.shape[0], c.shape[1], cute.ceil_div(a.shape[1], STEP)
        down, right = (1, x.cluster) if const_expr(x.across) else (x.cluster, 1)
        g = PacedGlobals(
            a=tk.gl.load(a, self.a_tile, right), b=tk.gl.load(transposed(b), self.b_tile, down),
            c=tk.gl.store(c, self.c_tile) if const_expr(spec.store == "tma") else c,
            scale_a=self.scales(scale_a, m, steps),
            scale_b=self.scales(scale_b, cute.ceil_div(n, GROUP) if const_expr(spec.scales == "block") else n, steps),
            bias=vector(spec.bias, bias, n) if const_expr(spec.bias is not None) else None,
            out_scale=vector("fp32", out_scale, 1) if const_expr(spec.out == "e4m3") else None,
            m=m, n=n, rows=cute.ceil_div(m, x.m * down), cols=cute.ceil_div(n, x.n * right), steps=steps,
            counter=counter)
        grid = tk.blocks_for("static", g.rows * g.cols, cutlass.max(blocks, x.cluster), x.cluster)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[tk.WARPGROUP * (1 + x.consumers), 1, 1],
                              cluster=[x.cluster, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=x.pdl)

    @cute.jit
    def roles(self, g):
        x = self.config
        if tk.warp_id() == 0:
            tk.prefetch(g.a, g.b)
        s = self.shared(g, tk.SharedAllocator())
        tk.init_block(s.pipe.init, x.cluster)
        if const_expr(x.pdl):  # as in Fp8Gemm
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tk.specialise(lambda: self.produce(g, s), lambda wg: self.consume(g, s, wg), x.consumers,
                      (56, 224) if self.spec.per_step and x.consumers == 2 else ())
        if const_expr(x.cluster > 1):
            tk.cluster_sync()

    def order_of(self, g, s):
        return self.order(g, s)

    def tile_of(self, g, s, order, number):
        return self.tile(g, s, order, number)

    def load_stage(self, g, s, t, k, r):
        sem = s.pipe.acquire(r)
        self.load_tiles(g, s, r.stage, t, k, sem)
        if self.spec.per_step:
            self.load_scales(g, s.scales[None, r.stage], t, k)
            tk.copy_async_arrive(sem)

    def counter(self, g):
        return g.counter


class PacedFp8Gemm(PacedFp8, fp8.Fp8Gemm):
    pass


class PacedSpreadFp8Gemm(PacedFp8, SpreadFp8Gemm):
    pass


class PacedRollingFp8Gemm(PacedFp8, RollingFp8Gemm):
    pass


def build(spec: Fp8Spec, config: PacedFp8Config):
    """(kernel, fake arguments): as ``fp8.build``, and the counter's address."""
    kernel = PacedSpreadFp8Gemm if config.spread else PacedRollingFp8Gemm if config.rolling else PacedFp8Gemm
    scales = (Int64(1), Int64(1), Int64(1))
    return kernel(spec, config), (*fp8.operands(spec), scales, scales, Int64(1), Int64(1), Int32(1), Int64(1))
