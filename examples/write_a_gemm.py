"""C = A @ B.T in bf16, written on tkq.tile's load-compute-finish template and called from PyTorch.
Run it: with a Hopper GPU it is checked against PyTorch and timed with it and tkq.gemm; without one it is only compiled.
"""
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

import tkq
import tkq.tile as tk
from tkq import runtime
from tkq.runtime import arch, fake
from tkq.testing import sass, timing


@dataclass(frozen=True)
class Globals:
    a: tk.gl
    b: tk.gl
    c: tk.gl
    schedule: tk.Schedule
    rows: Int32  # of tiles
    cols: Int32


class Gemm(tk.LCF):
    """One task is a 128 x 256 tile of C: 64 rows for each of two consumer warpgroups, 128 accumulators per thread. K
    advances in steps of 64, with four stages in flight."""

    consumers, stages = 2, 4
    a, b, c = tk.st(128, 64), tk.st(256, 64), tk.st(64, 64)
    inputs, scratch = dict(a=a, b=b), dict(c=(c, 4))  # one stage; two epilogue tiles per consumer

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, blocks: Int32, stream: cuda.CUstream):
        rows, cols = cute.ceil_div(c.shape[0], 128), cute.ceil_div(c.shape[1], 256)
        g = Globals(tk.gl.load(a, self.a), tk.gl.load(b, self.b), tk.gl.store(c, self.c), tk.Schedule(rows * cols),
                    rows, cols)
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[384, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, g: Globals):
        self.run(g)

    def task(self, g, number):
        """Raster: bands 8 tiles wide, row by row, so that concurrent tiles share A and B in L2."""
        band = number // (g.rows * 8)
        width, rest = cutlass.min(g.cols - band * 8, 8), number - band * g.rows * 8
        return tk.Task(rest // width, band * 8 + rest % width, cute.ceil_div(g.a.tensor.shape[1], 64))

    def load(self, g, t, i, x, sem):
        tk.load_async(x["a"][0], g.a, (t.row, i), sem)
        tk.load_async(x["b"][0], g.b, (t.col, i), sem)

    def start(self, g, t, wg):
        acc = tk.rt_fl(256)
        tk.zero(acc)
        return acc

    def compute(self, g, t, i, x, acc, wg):
        tk.mma_ABt(acc, x["a"][0], x["b"][0], a_part=wg)

    @cute.jit
    def finish(self, g, t, acc, s, wg):
        for p in cutlass.range_constexpr(4):  # 64 columns at a time, through one of two tiles
            panel = s["c"][2 * wg + p % 2]
            tk.store_wait(1)  # the store before the last has read its tile
            tk.sync(8 + wg, tk.WARPGROUP)
            tk.store(panel, tk.columns(acc, p * 64, 64))
            tk.publish()
            tk.sync(8 + wg, tk.WARPGROUP)
            if tk.first_warp_of_group():
                tk.store_async(g.c, panel, (t.row * 2 + wg, t.col * 4 + p))


def build():
    m, n, k = fake.sym(), fake.sym(8), fake.sym(8)
    return Gemm(), (*(fake.tensor("bf16", shape) for shape in ((m, k), (n, k), (m, n))), 1)


RECIPE = runtime.Recipe("write_a_gemm:build")


def gemm(a, b):
    """(M, K) and (N, K) bf16 to (M, N); K and N multiples of 8."""
    c = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    tasks = -(-a.shape[0] // 128) * -(-b.shape[0] // 256)
    rounds = -(-tasks // arch.num_sms(a.device))
    runtime.function(RECIPE)(a, b, c, -(-tasks // rounds))  # the fewest CTAs with the same number of waves
    return c


def check(M, N, K):
    a, b = [torch.randn(rows, K, device="cuda").bfloat16() for rows in (M, N)]
    exact = a.double() @ b.double().t()
    error, theirs = [(c.double() - exact).abs().max().item() for c in (gemm(a, b), a @ b.t())]
    assert error <= 2 * theirs, f"{M} x {N} x {K}: error {error}, PyTorch's is {theirs}"
    return error


def main():
    if not torch.cuda.is_available():
        print(sass.shown("gemm", RECIPE), "\nNo GPU: compiled for sm_90a, nothing run or timed.")
        return
    errors = [check(*shape) for shape in ((128, 256, 64), (1000, 520, 200), (300, 2056, 4096))]
    make = lambda i: [torch.randn(4096, 4096, device="cuda").bfloat16() for _ in range(2)]
    both = timing.compare({"this": gemm, "tkq.gemm": lambda a, b: tkq.gemm(a, b.t()), "torch": lambda a, b: a @ b.t()},
                          make)
    print(f"errors up to {max(errors):.3f},", *[f"{t.name} {t.median_ms:.3f} ms," for t in both.timings],
          f"{timing.ratio(both['this'], both['tkq.gemm']):.2f} of tkq.gemm's speed")


if __name__ == "__main__":
    main()
