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
    OF_ONE,
    PASSES,
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
    """A thread block has a head after the other: for 16 k1 at a time sums over kb, ka and k1, the last of which it adds
    to those of the 16 before; their real part is the gradient."""

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
        me = cute.arch.thread_idx()[0]
        z = tk.SharedAllocator().allocate_tensor(Float32, cute.make_layout((2, 2 * EACH * OF_ONE)), 16)
        for head in cutlass.range(cute.arch.block_idx()[0], g.sums.shape[0], cute.arch.grid_dim()[0], unroll=1):
            for half in cutlass.range(PASSES, unroll=1):
                self.over_kb(g, z, (head, half), me)
                tk.sync_block()
                self.over_ka(z, me)
                tk.sync_block()
                self.over_k1(z, (g, head, half), me)
                tk.sync_block()

    @cute.jit
    def over_kb(self, g: Given, z: cute.Tensor, at, me):
        """z = of a k1 and a ka the sums over kb, times factors. at: (head, which half of the k1)"""
        (head, half), slot, ka, x = at, me // DIGITS, me % DIGITS, []
        which, m = slot // EACH, slot % EACH
        for kb in cutlass.range_constexpr(0, DIGITS, 2):
            four = cute.make_rmem_tensor((4,), Float32)
            there = head, 2 * m + half, 2 * (kb // 8) + which, 4 * ka + kb % 8 // 2, 0
            cute.autovec_copy(vectors.run_at(g.sums, there, 4), four)
            x += [(four[e], four[2 + e]) for e in range(2)]
        roots = powers(conjugate(conjugate_root(ka, COLUMNS)), DIGITS)
        for b, (y, by) in enumerate(zip(back(x), roots, strict=True)):
            put(z, OF_ONE * slot + PADDED * ka + b, times(y, by) if b else y)

    @cute.jit
    def over_ka(self, z: cute.Tensor, me):
        """In place."""
        slot, b = me // DIGITS, me % DIGITS
        for a, y in enumerate(back([get(z, OF_ONE * slot + PADDED * ka + b) for ka in range(DIGITS)])):
            put(z, OF_ONE * slot + PADDED * a + b, y)

    @cute.jit
    def over_k1(self, z: cute.Tensor, of, me):
        """taps += of each column 32 a + b, times factors, the sums over k1 = 4 m + group, of n1 = 8 p + s. of:
        (`Given`, head, which half of the k1)"""
        for step in cutlass.range(COLUMNS // THREADS, unroll=1):
            column, total = step * THREADS + me, [Float32(0.0)] * DIGITS
            by = powers(conjugate(conjugate_root(column, POINTS // 4)), EACH)
            at = column // DIGITS * PADDED + column % DIGITS
            for which in cutlass.range_constexpr(2):
                quarter = 4 * (2 * of[2] + which) - 1
                of_p = [conjugate_root(quarter * p, 16) for p in range(4)]
                first = conjugate(conjugate_root(quarter * column, 4 * POINTS))
                x = [times(get(z, OF_ONE * (EACH * which + m) + at), times(first, by[m]) if m else first)
                     for m in range(EACH)]
                for s, y in enumerate(back(x)):
                    re, im = times(y, conjugate(conjugate_root(quarter * s, 4 * DIGITS))) if s else y
                    for p in cutlass.range_constexpr(4):
                        total[EACH * p + s] = total[EACH * p + s] + (re * of_p[p][0] + im * of_p[p][1])
            self.add(of, column, total)

    @cute.jit
    def add(self, of, column, total):
        """To a column's taps, of each n1 one, which this thread alone has."""
        (g, head, half), before = of, cute.make_rmem_tensor((DIGITS,), Float32)
        before.fill(0.0)
        if half > 0:
            for n1 in cutlass.range_constexpr(DIGITS):  # without branches: all of them are under way together
                token = cutlass.min(COLUMNS * n1 + column, g.taps.shape[1] - 1)
                before[n1] = vectors.run_at(g.taps, (head, token), 1)[0]
        for n1 in cutlass.range_constexpr(DIGITS):
            token, found = COLUMNS * n1 + column, before[n1] + total[n1]
            if token < g.taps.shape[1]:
                vectors.run_at(g.taps, (head, token), 1)[0] = found
