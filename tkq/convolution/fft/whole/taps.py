"""A filter's gradient of its spectrum at frequencies k - 1/4, in float32: the way back of `filters`."""
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.convolution.fft.whole.digits import DIGITS, PADDED, POINTS, TILES
from tkq.convolution.fft.whole.filters import (
    COLUMNS,
    EACH,
    GROUPS,
    OF_ONE,
    THREADS,
    conjugate_root,
    get,
    powers,
    put,
    times,
    transform,
)
from tkq.runtime.compile import fake
from tkq.tile import vectors

RUNS = 8  # of four numbers, that a thread has of a tile


def conjugate(x):
    return x[0], -x[1]


def back(x: list) -> list:
    """The conjugate of `transform`'s sum."""
    return [(re, im) for im, re in transform([(im, re) for re, im in x])]


class Given(NamedTuple):
    """sums (H, 16 tiles, 8, 128, 4) fp32 of `gradient.WholeFilterGradient`; taps (H, taps) fp32"""

    sums: cute.Tensor
    taps: cute.Tensor


class FilterTaps:
    """A thread block has a head after the other: for 8 k1 at a time sums over kb, ka and k1, the last of which it adds
    up in shared memory; their real part is the gradient."""

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        H = fake.sym()
        return fake.tensor("fp32", (H, TILES, RUNS, tk.WARPGROUP, 4)), fake.tensor("fp32", (H, fake.sym())), Int32(0)

    @cute.jit
    def __call__(self, sums: cute.Tensor, taps: cute.Tensor, blocks: Int32, stream: cuda.CUstream):
        self.kernel(Given(sums, taps)).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        al, me = tk.SharedAllocator(), cute.arch.thread_idx()[0]
        taps = al.allocate_tensor(Float32, cute.make_layout(POINTS), 16)
        z = al.allocate_tensor(Float32, cute.make_layout((2, EACH * OF_ONE)), 16)
        for head in cutlass.range(cute.arch.block_idx()[0], g.sums.shape[0], cute.arch.grid_dim()[0], unroll=1):
            for step in cutlass.range(POINTS // THREADS, unroll=8):  # those that this thread adds to
                taps[step * THREADS + me] = Float32(0.0)
            for group in cutlass.range(GROUPS, unroll=1):
                self.over_kb(g, z, head, group, me)
                tk.sync_block()
                self.over_ka(z, me)
                tk.sync_block()
                self.over_k1(z, taps, group, me)
                tk.sync_block()
            for step in cutlass.range(POINTS // THREADS, unroll=8):
                token = step * THREADS + me
                if token < g.taps.shape[1]:
                    vectors.run_at(g.taps, (head, token), 1)[0] = taps[token] * Float32(1.0 / POINTS)

    @cute.jit
    def over_kb(self, g: Given, z: cute.Tensor, head, group, me):
        """z = of a k1 and a ka the sums over kb, times factors."""
        (m, ka), x = (me // DIGITS, me % DIGITS), []
        for kb in cutlass.range_constexpr(0, DIGITS, 2):
            run, four = 2 * (kb // 8) + group % 2, cute.make_rmem_tensor((4,), Float32)
            at = head, 2 * m + group // 2, run, 4 * ka + kb % 8 // 2, 0
            cute.autovec_copy(vectors.run_at(g.sums, at, 4), four)
            x += [(four[e], four[2 + e]) for e in range(2)]
        for b, (y, by) in enumerate(zip(back(x), powers(conjugate(conjugate_root(ka, COLUMNS)), DIGITS), strict=True)):
            put(z, OF_ONE * m + PADDED * ka + b, times(y, by) if b else y)

    @cute.jit
    def over_ka(self, z: cute.Tensor, me):
        """In place."""
        m, b = me // DIGITS, me % DIGITS
        for a, y in enumerate(back([get(z, OF_ONE * m + PADDED * ka + b) for ka in range(DIGITS)])):
            put(z, OF_ONE * m + PADDED * a + b, y)

    @cute.jit
    def over_k1(self, z: cute.Tensor, taps: cute.Tensor, group, me):
        """taps += of each column 32 a + b, times factors, the sums over k1 = 4 m + group, of n1 = 8 p + s."""
        quarter = 4 * group - 1
        of_p = [conjugate_root(quarter * p, 16) for p in range(4)]
        of_s = [conjugate(conjugate_root(quarter * s, 4 * DIGITS)) for s in range(EACH)]
        for step in cutlass.range(COLUMNS // THREADS, unroll=1):
            column = step * THREADS + me
            first = conjugate(conjugate_root(quarter * column, 4 * POINTS))
            by = powers(conjugate(conjugate_root(column, POINTS // 4)), EACH)
            at = column // DIGITS * PADDED + column % DIGITS
            x = [times(get(z, OF_ONE * m + at), times(first, by[m]) if m else first) for m in range(EACH)]
            for s, y in enumerate(back(x)):
                re, im = times(y, of_s[s]) if s else y
                for p in cutlass.range_constexpr(4):
                    n = COLUMNS * (EACH * p + s) + column
                    taps[n] = taps[n] + (re * of_p[p][0] + im * of_p[p][1])
