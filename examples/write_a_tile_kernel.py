"""C = activation(A @ B.T + bias) in one kernel, written on tkq.tile and called from PyTorch.
Run it: with a Hopper GPU it is checked against PyTorch and timed with it; without one it is only compiled.
"""
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch

import tkq.tile as tk
from tkq import runtime
from tkq.runtime import arch, fake
from tkq.testing import sass, timing

# activation(x) = x * sigmoid(gate(x)); gelu in its tanh form
GATES = {"silu": lambda x: x, "gelu": lambda x: 1.5957691216 * (x + 0.044715 * x * x * x)}
RECIPES = {name: runtime.Recipe("write_a_tile_kernel:build", (name,)) for name in GATES}


@dataclass(frozen=True)
class Globals:
    a: tk.gl
    b: tk.gl
    c: tk.gl
    bias: cute.Tensor
    schedule: tk.Schedule
    rows: cutlass.Int32  # of tiles


class Linear(tk.LCF):
    """Tiles of 128 x 256, half for each of two consumer warpgroups; K in steps of 64, with four stages in flight."""

    consumers, stages = 2, 4
    a, b, c = tk.st(64, 64), tk.st(256, 64), tk.st(64, 64)
    inputs, scratch = dict(a=(a, 2), b=b), dict(c=(c, 2))

    def __init__(self, activation):
        self.gate = GATES[activation]

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, bias: cute.Tensor, c: cute.Tensor, num_sms: cutlass.Int32,
                 stream: cuda.CUstream):
        rows, cols = cute.ceil_div(c.shape[0], 128), cute.ceil_div(c.shape[1], 256)
        g = Globals(tk.gl.load(a, self.a), tk.gl.load(b, self.b), tk.gl.store(c, self.c), bias,
                    tk.Schedule(rows * cols), rows)
        grid = tk.blocks_for("static", rows * cols, num_sms)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[384, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, g: Globals):
        self.run(g)

    def task(self, g, number):
        return tk.Task(number % g.rows, number // g.rows, cute.ceil_div(g.a.tensor.shape[1], 64))

    def load(self, g, t, i, x, sem):
        for w in range(2):
            tk.load_async(x["a"][w], g.a, (t.row * 2 + w, i), sem)
        tk.load_async(x["b"][0], g.b, (t.col, i), sem)

    def start(self, g, t, wg):
        acc = tk.rt_fl(256)
        tk.zero(acc)
        return acc

    def compute(self, g, t, i, x, acc, wg):
        tk.mma_ABt(acc, x["a"][wg], x["b"][0])

    def activate(self, x):
        return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(self.gate(x) * -tk.LOG2E, fastmath=True))

    @cute.jit
    def finish(self, g, t, acc, s, wg):
        panel, bias = tk.rt_fl(64), tk.cv(64)
        for p in cutlass.range_constexpr(4):
            tk.load_cols(bias, g.bias, t.col * 256 + p * 64, cute.size(g.bias))
            tk.add_col(panel, tk.columns(acc, p * 64, 64), bias)
            tk.apply(panel, self.activate, panel)
            if tk.first_warp_of_group():
                tk.store_wait()  # the previous store has read its tile
            tk.sync(8 + wg, tk.WARPGROUP)
            tk.store(s["c"][wg], panel)
            tk.publish()
            tk.sync(8 + wg, tk.WARPGROUP)
            if tk.first_warp_of_group():
                tk.store_async(g.c, s["c"][wg], (t.row * 2 + wg, t.col * 4 + p))


def build(activation):
    m, n, k = fake.sym(), fake.sym(8), fake.sym(8)
    return Linear(activation), (*(fake.tensor("bf16", shape) for shape in ((m, k), (n, k), (n,), (m, n))), 1)


def linear(a, b, bias, activation):
    """(M, K), (N, K), (N,) bf16 to (M, N); K and N multiples of 8."""
    c = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    runtime.function(RECIPES[activation])(a, b, bias, c, arch.num_sms(a.device))
    return c


def check_and_time(name, peer):
    make = lambda i: [torch.randn(s, device="cuda").bfloat16() for s in ((8100, 4096), (4104, 4096), (4104,))]
    candidates = {"tkq": lambda *x: linear(*x, name), "torch": lambda a, b, bias: peer(torch.addmm(bias, a, b.t()))}
    inputs = make(0)
    exact = candidates["torch"](*(x.double() for x in inputs))
    error, theirs = [(f(*inputs).double() - exact).abs().max().item() for f in candidates.values()]
    assert error <= 2 * theirs, f"{name}: error {error}, PyTorch's is {theirs}"
    times = [f"{t.name} {t.median_ms:.3f} ms" for t in timing.compare(candidates, make).timings]
    print(f"{name}: error {error:.3f} (torch {theirs:.3f}),", *times)


if __name__ == "__main__":
    for name, peer in (("silu", torch.nn.SiLU()), ("gelu", torch.nn.GELU("tanh"))):
        if torch.cuda.is_available():
            check_and_time(name, peer)
        else:
            print(sass.shown(name, RECIPES[name]), "\nNo GPU: compiled for sm_90a, nothing run or timed.")
