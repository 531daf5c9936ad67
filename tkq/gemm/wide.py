"""A 16-bit GEMM in tiles of 256 x 192, which read the least from L2 for each product."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .. import tile as tk
from . import operands
from .fp8 import Fp8Gemm
from .fp8_state import Globals
from .spec import GemmSpec
from .wide_config import STEP, WideConfig, sixteen


class WideGemm(Fp8Gemm):
    """As Fp8Gemm, of 16-bit operands in any order and without scales: two waves of 64 rows to each consumer, whose 192
    registers of sums leave none for a result to wait in."""

    def __init__(self, spec: GemmSpec, config: WideConfig):
        x = config.check(spec).shape
        super().__init__(sixteen(spec), x)
        self.order_of, dtype = spec, self.a_dtype
        a_t, b_t = spec.transposed
        self.a_tile = tk.st(STEP, x.m, dtype) if a_t else tk.st(x.m, STEP, dtype)
        self.b_tile = tk.st(x.n, STEP, dtype) if b_t else tk.st(STEP, x.n, dtype)
        self.mm, self.mma = operands.products(spec)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, bias, c, alpha: Float32, beta: Float32,
                 blocks: Int32, stream: cuda.CUstream):
        x, spec = self.config, self.order_of
        A, m, n = operands.matrix(a, spec.transposed[0]), out.shape[0], out.shape[1]
        down, right = (1, x.cluster) if const_expr(x.across) else (x.cluster, 1)
        K = a.shape[1]
        g = Globals(
            a=tk.gl.load(A, self.a_tile, right), b=tk.gl.load(operands.weights(b, spec), self.b_tile, down),
            c=tk.gl.store(out, self.c_tile), scale_a=None, scale_b=None, bias=None, out_scale=None, m=m, n=n,
            rows=cute.ceil_div(m, x.m * down), cols=cute.ceil_div(n, x.n * right), steps=cute.ceil_div(K, STEP))
        grid = tk.blocks_for("static", g.rows * g.cols, blocks, x.cluster)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[tk.WARPGROUP * (1 + x.consumers), 1, 1],
                              cluster=[x.cluster, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=x.pdl)

    def stage_tiles(self):
        return self.a_tile, self.b_tile

    def load_tiles(self, g, s, stage, t, k, sem):
        a_t, b_t = self.order_of.transposed
        tk.load_async(s.a[stage], g.a, (k, t.row) if a_t else (t.row, k), sem)
        tk.load_async(s.b[stage], g.b, (t.col, k) if b_t else (k, t.col), sem)

    def multiply_wave(self, product, acc, s, r, w, wg):
        product(acc, s.a[r.stage], s.b[r.stage], a_part=wg * self.config.waves + w)


def build(spec: GemmSpec, config: WideConfig):
    """(kernel, fake arguments): as ``dense.build``."""
    return WideGemm(spec, config), (*operands.fakes(spec), Int32(1))
