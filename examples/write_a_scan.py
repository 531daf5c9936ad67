"""A scan along rows with an associative operation of your own, written on tkq.tile and called from PyTorch.

    python examples/write_a_scan.py

h[t] = max(a[t] + h[t - 1], b[t]), the recurrence of alignments and of the Viterbi algorithm. With a Hopper GPU it is
checked against PyTorch and timed beside torch.cumsum; without one it is only compiled.
"""
import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32

import tkq.tile as tk
from tkq import runtime
from tkq.runtime import fake
from tkq.testing import sass, timing
from tkq.tile import vectors

WARPS, LANES, EACH = 4, 32, 4  # rows of a block; lanes; neighbours of a lane

# An operation: (combine(earlier, later), neutral element). Elements are tuples; the last value of one is the result.
OPERATIONS = {
    "max_plus": (lambda x, y: (x[0] + y[0], cute.arch.fmax(x[1] + y[0], y[1])), (0.0, -math.inf)),
    "linear": (lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1]), (1.0, 0.0)),
}
RECIPES = {name: runtime.Recipe("write_a_scan:build", (name,)) for name in OPERATIONS}


class RowScan:
    """A warp has a row, 128 neighbours at a time: each lane combines its own four, the lanes combine theirs by shuffles
    in five steps, and what was before comes in front of all."""

    def __init__(self, operation):
        self.combine, self.neutral = OPERATIONS[operation]

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, h: cute.Tensor, stream: cuda.CUstream):
        self.kernel(a, b, h).launch(grid=[cute.ceil_div(a.shape[0], WARPS), 1, 1], block=[WARPS * LANES, 1, 1],
                                    stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, h: cute.Tensor):
        (rows, columns), lane = a.shape, tk.lane_id()
        row = cute.arch.block_idx()[0] * WARPS + tk.warp_id()
        carry = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(2):
            carry[i] = Float32(self.neutral[i])
        if row < rows:
            for base in cutlass.range(0, columns, LANES * EACH, unroll=1):
                t = base + lane * EACH
                elements = self.load(a, b, (row, t))
                for i in cutlass.range_constexpr(EACH - 1):
                    elements[i + 1] = self.combine(elements[i], elements[i + 1])
                total = elements[EACH - 1]
                for i in cutlass.range_constexpr(LANES.bit_length() - 1):
                    joined = self.combine(self.below(total, 1 << i), total)
                    total = self.chosen(lane >= 1 << i, joined, total)
                before = self.chosen(lane > 0, self.below(total, 1), self.neutral)
                before = self.combine((carry[0], carry[1]), before)
                self.store(h, (row, t), [self.combine(before, x)[1] for x in elements])
                last = [cute.arch.shuffle_sync(x, LANES - 1) for x in total]
                carry[0], carry[1] = self.combine((carry[0], carry[1]), last)

    def load(self, a, b, at):
        """A lane's elements; neutral ones behind the row's end."""
        row, t = at
        inside, t = t < a.shape[1], cutlass.min(t, a.shape[1] - EACH)
        values = [vectors.wide(vectors.load(vectors.run_at(x, (row, t), EACH))) for x in (a, b)]
        return [self.chosen(inside, x, self.neutral) for x in zip(*values)]

    @cute.jit
    def store(self, h: cute.Tensor, at, values):
        if at[1] < h.shape[1]:
            vectors.store(vectors.packed(values, Float32), vectors.run_at(h, at, EACH))

    def below(self, x, lanes):
        return [cute.arch.shuffle_sync_up(value, lanes, mask_and_clamp=0) for value in x]

    def chosen(self, condition, x, y):
        return [cutlass.select_(condition, value, Float32(other)) for value, other in zip(x, y)]


def build(operation):
    rows, columns = fake.sym(), fake.sym(EACH)
    return RowScan(operation), tuple(fake.tensor("fp32", (rows, columns)) for _ in range(3))


def scan(operation, a, b):
    """a, b: (M, N) fp32, N a multiple of 4. Returns the scan's results, likewise."""
    h = torch.empty_like(a)
    runtime.function(RECIPES[operation])(a, b, h)
    return h


def exactly(operation, a, b):
    """In float64, from one to the next."""
    step = {"max_plus": lambda a, b, h: torch.maximum(a + h, b), "linear": lambda a, b, h: a * h + b}[operation]
    found, h = [], torch.full_like(b[:, 0], OPERATIONS[operation][1][1], dtype=torch.float64)
    for i in range(a.shape[1]):
        h = step(a[:, i].double(), b[:, i].double(), h)
        found.append(h)
    return torch.stack(found, 1)


def check_and_time(operation):
    for shape in ((3, 4), (5, 132), (66, 1000)):
        a, b = torch.randn(shape, device="cuda").tanh(), torch.randn(shape, device="cuda")
        error = (scan(operation, a, b) - exactly(operation, a, b)).abs().max().item()
        assert error <= 1e-5 * shape[1]**0.5, f"{operation} of {shape}: error {error}"
    make = lambda i: [torch.randn(8192, 4096, device="cuda") for _ in range(2)]
    candidates = {"tkq": lambda a, b: scan(operation, a, b), "cumsum": lambda a, b: b.cumsum(1)}
    times = [f"{t.name} {t.median_ms:.3f} ms" for t in timing.compare(candidates, make).timings]
    print(f"{operation}: error {error:.1e},", *times)


if __name__ == "__main__":
    for operation in OPERATIONS:
        if torch.cuda.is_available():
            check_and_time(operation)
        else:
            print(sass.shown(operation, RECIPES[operation]), "\nNo GPU: compiled for sm_90a, nothing run or timed.")
