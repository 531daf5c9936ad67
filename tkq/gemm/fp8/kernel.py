"""C = A @ B in float8 with scales: persistent, its roles apart, TMA in and out."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ... import tile as tk
from .block import Block
from .config import STEP, Fp8Config
from .matrices import Matrices
from .spec import BYTES, GROUP, Fp8Spec
from .state import Globals, Tiles, scales_at, transposed, vector


class Fp8Gemm:
    """One warp loads, ``consumers`` warpgroups multiply. Block b of a grid of n takes tiles b, b + n, ..

    Roles:
      warpgroup 0, warp 0   for each tile, for each step of 128 of K: acquire a stage, load A's and B's tile into it,
                            and the step's scales where there are such
      warpgroups 1 ..       m_subtiles x 64 rows each. For each tile:
          sums of all of K  for each step: wait for its stage, wgmma, release the stage before
          promoted          for each step, subtile and part: wgmma from zero; its scales meet in registers under it;
                            add what came out, scaled, to the sums in fp32
                            scale, bias, activation; subtile by subtile to shared memory and out

      time      ->
      producer    |k0 k1 .. kn|k0 k1 ..         as stages come free: it does not know where a tile ends
      consumer 1 |k0 .. kn|store|k0 .. ``stagger_stages`` stages ahead of the second, so that consumer 2 |k0 ..
      kn|store|k0 .. one's epilogue overlaps the other's mainloop

    ``Block`` has the pipeline and the parts. Which of them a config means:
      promotion_unroll, promote   the mainloop: ``PipelinedPromotion``, else ``Promotion``, else ``Mainloop``
      overlap_epilogue            the consumer: ``OverlappedPromotionConsumer`` or ``OverlappedConsumer``, else
                                  ``Consumer``
      wave_sync                   the producer: ``WaveSync``, else ``Producer``
    """

    def __init__(self, spec: Fp8Spec, config: Fp8Config):
        self.spec, self.config, self.tiles = spec, config.check(spec), Tiles.of(spec, config)
        self.block = Block(spec, config, self.tiles, Matrices(spec, config, self.tiles))

    def __str__(self):
        """Part of the kernel's name."""
        return f"tkqgemm Fp8Gemm {self.block.parts}"

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale_a: tuple, scale_b: tuple, bias: Int64,
                 out_scale: Int64, blocks: Int32, stream: cuda.CUstream):
        self.launch(self.globals((a, b, c), (scale_a, scale_b), bias, out_scale), blocks, stream)

    def globals(self, matrices, scales, bias, out_scale, counter=None) -> Globals:
        x, spec, tiles, (a, b, c), (scale_a, scale_b) = self.config, self.spec, self.tiles, matrices, scales
        m, n, steps = c.shape[0], c.shape[1], cute.ceil_div(a.shape[1], STEP)
        down, right = (1, x.cluster) if const_expr(x.cluster_along_n) else (x.cluster, 1)
        return Globals(
            a=tk.gl.load(a, tiles.a, right), b=tk.gl.load(transposed(b), tiles.b, down),
            c=tk.gl.store(c, tiles.c) if const_expr(spec.store == "tma") else c,
            scale_a=scales_at(spec, scale_a, m, steps),
            scale_b=scales_at(spec, scale_b, cute.ceil_div(n, GROUP) if const_expr(spec.scale_b == "128x128") else n,
                              steps),
            bias=vector(spec.bias, bias, n) if const_expr(spec.bias is not None) else None,
            out_scale=vector("fp32", out_scale, 1) if const_expr(spec.out == "e4m3") else None,
            m=m, n=n, rows=cute.ceil_div(m, x.m * down), cols=cute.ceil_div(n, x.n * right), steps=steps,
            counter=counter)

    def launch(self, g, blocks, stream):
        cluster = self.config.cluster
        grid = tk.blocks_for("static", g.rows * g.cols, cutlass.max(blocks, cluster), cluster)
        self.block.launch(self.kernel(g), grid, stream)

    def fake_arguments(self) -> tuple:
        """What it is compiled for: a, b, c; (address, stride, stride) of each operand's scales; the addresses of bias
        and out_scale, 0 where there is none; how many blocks to launch."""
        scales = (Int64(1), Int64(1), Int64(1))
        return *operands(self.spec), scales, scales, Int64(1), Int64(1), Int32(1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        self.block.run(g)


class WithCounter:
    """An Fp8Gemm with wave sync, called with one argument more: the address of its counter."""

    def __init__(self, spec: Fp8Spec, config: Fp8Config):
        self.gemm = Fp8Gemm(spec, config)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale_a: tuple, scale_b: tuple, bias: Int64,
                 out_scale: Int64, blocks: Int32, counter: Int64, stream: cuda.CUstream):
        g = self.gemm.globals((a, b, c), (scale_a, scale_b), bias, out_scale, counter)
        self.gemm.launch(g, blocks, stream)

    def fake_arguments(self) -> tuple:
        """What it is compiled for: the gemm's, and the counter's address."""
        return *self.gemm.fake_arguments(), Int64(1)


def operands(spec: Fp8Spec):
    """Fake a (M, K), b (K, N) and c (M, N): any sizes, K-contiguous, and what TMA asks of strides."""
    from ...runtime.compile import fake

    M, N, K = fake.sym(), fake.sym(), fake.sym(divisibility=16)
    unit = 16 // BYTES[spec.out] if spec.store == "tma" else 1
    return (fake.tensor(spec.a, (M, K), (fake.sym64(divisibility=16), 1)),
            fake.tensor(spec.b, (K, N), (1, fake.sym64(divisibility=16))),
            fake.tensor(spec.out, (M, N), (fake.sym64(divisibility=unit), 1), align=unit * BYTES[spec.out]))
