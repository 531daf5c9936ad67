"""The spectrum of a filter's gradient, of whole sequences: of each head the sum over its sequences of conj(V) W, the
spectra of v = pre * u and w = post * dy that other kernels have left in memory."""
import math
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk
from tkq.convolution.fft.operands import Operands
from tkq.convolution.fft.tables import BIAS, power_of_two
from tkq.convolution.fft.tokens import load16
from tkq.convolution.fft.whole.digits import POINTS, SCALES, TILES
from tkq.convolution.fft.whole.kept import fake_kept
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.halves import numbers

THREADS = 256
RUNS = TILES * 4 * tk.WARPGROUP  # of 8 numbers, that a sequence's spectrum has: each of a thread
TOGETHER = 4  # sequences whose numbers are under way at once
NOT_FINITE = 255
# The power of 2 that both spectra lack, by the scales of factors, but for the number of frequencies, by which the sum
# over these is divided before it is made: it overflows where the gradient does.
SCALE = -2 * sum(round(math.log2(x)) for x in SCALES) - round(math.log2(POINTS))


class Given(NamedTuple):
    """`Kept` of v and of w; sums (H, 16 tiles, 8, 128 threads, 4) fp32, divided
    by the number of frequencies."""

    v: cute.Tensor
    of_v: cute.Tensor
    w: cute.Tensor
    of_w: cute.Tensor
    sums: cute.Tensor


class WholeFilterGradient:
    """A thread has 4 frequencies of a head, of all of its sequences, one after the other. What each was divided by, a
    power of 2, the product gets back; it is NaN where a sequence had some."""

    def __init__(self, spec):
        self.spec = spec

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        operands = Operands(self.spec)
        v, w = (fake_kept(operands) for _ in range(2))
        return v.spectra, (v.exponents, *w, fake.tensor("fp32", (operands.H, TILES, 8, tk.WARPGROUP, 4)))

    @cute.jit
    def __call__(self, v: cute.Tensor, others, stream: cuda.CUstream):
        """others: those of `Given` behind v."""
        blocks = v.shape[0] * (RUNS // THREADS)
        self.kernel(Given(v, *others)).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        item = cute.arch.block_idx()[0]
        head, run = item // (RUNS // THREADS), item % (RUNS // THREADS) * THREADS + cute.arch.thread_idx()[0]
        at = run // (4 * tk.WARPGROUP), run // tk.WARPGROUP % 4, run % tk.WARPGROUP  # tile, block of 8 kb, thread
        sums = cute.make_rmem_tensor((4, 2), Float32)
        sums.fill(0.0)
        for first in cutlass.range(0, g.v.shape[1], TOGETHER, unroll=1):
            held = [self.load(g, head, first + i, at) for i in range(TOGETHER)]
            for v, w, exponents in held:
                self.add(sums, v, w, self.factor(*exponents))
        for half in cutlass.range_constexpr(2):
            there = vectors.run_at(g.sums, (head, at[0], 2 * at[1] + half, at[2], 0), 4)
            cute.autovec_copy(sums[None, half], there)

    def load(self, g: Given, head, batch, at):
        """A sequence's words of v and of w, 0 behind the last one, and their exponents."""
        there, nearest, found = batch < g.v.shape[1], cutlass.min(batch, g.v.shape[1] - 1), []
        for x in (g.v, g.w):
            found.append(load16(vectors.run_at(x, (head, nearest, *at, 0), 8).iterator.toint(), there))
        return *found, (g.of_v[head, nearest], g.of_w[head, nearest])

    def factor(self, of_v, of_w):
        """As `tables.power` has divided."""
        least, most = self.spec.above + 2, 253
        exponent = sum(cutlass.min(cutlass.max(x, least), most) - BIAS - self.spec.above for x in (of_v, of_w))
        by = power_of_two(exponent + SCALE)
        return cutlass.select_(cutlass.max(of_v, of_w) < NOT_FINITE, by, Float32.inf - Float32.inf)

    def add(self, sums: cute.Tensor, v, w, by):
        """sums (4, 2) += by * conj(V) W: of each half two real and two imaginary parts."""
        for half in range(2):
            (a, b), (x, y) = ((numbers(of[2 * half]), numbers(of[2 * half + 1])) for of in (v, w))
            for e in range(2):
                sums[e, half] = sums[e, half] + by * (a[e] * x[e] + b[e] * y[e])
                sums[2 + e, half] = sums[2 + e, half] + by * (a[e] * y[e] - b[e] * x[e])
