"""Spectra of filters of up to 32768 taps at frequencies k - 1/4, in float32, as `kernel.WholeSequence` takes them."""
import math
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

import tkq.tile as tk
from tkq.convolution.fft.tables import BIAS, EXPONENT, magnitude, power_of, root
from tkq.convolution.fft.whole.digits import DIGITS, PADDED, POINTS, TILES
from tkq.runtime.compile import fake
from tkq.tile import vectors

THREADS = 512
WARPS = THREADS // 32
PASSES = 2  # of 16 digits k1 each: 4 m + group, of two neighbouring groups
EACH = 8  # m
LOADS = 32  # of a thread, under way together
COLUMNS = POINTS // DIGITS  # 32 a + b
OF_ONE = DIGITS * PADDED  # numbers of a k1, in rows of 32
LEAST, MOST = 2, 253  # exponents of a power of 2 that is finite, as its inverse is
SIZES = 2.0**80, 1.0, 2.0**-80  # taps times one of these have squares that an fp32 has
SMALL, LARGE = BIAS - 35, BIAS + 45  # exponents of largest taps, below and above which that is the first or the last


def times(x, y):
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def plus(x, y):
    return x[0] + y[0], x[1] + y[1]


def minus(x, y):
    return x[0] - y[0], x[1] - y[1]


def turned(x, i, n):
    """x times exp(-2 pi i / n), known when compiled."""
    if i == 0:
        return x
    if 4 * i == n:
        return x[1], -x[0]
    if 8 * i == n or 8 * i == 3 * n:
        by, (a, b) = math.sqrt(0.5), (x if 8 * i == n else (x[1], -x[0]))
        return (a + b) * by, (b - a) * by
    return times(x, (math.cos(2 * math.pi * i / n), -math.sin(2 * math.pi * i / n)))


def transform(x: list) -> list:
    """Of a power of 2 of complex numbers, each (real part, imaginary part)."""
    n = len(x)
    if n == 1:
        return x
    even, odd = transform(x[::2]), transform(x[1::2])
    odd = [turned(odd[k], k, n) for k in range(n // 2)]
    return [plus(*of) for of in zip(even, odd, strict=True)] + [minus(*of) for of in zip(even, odd, strict=True)]


def powers(x, n: int) -> list:
    """x to the 0th (None), 1st .. power, each a product of two that are about half of it."""
    found = [None, x]
    for i in range(2, n):
        found.append(times(found[i // 2], found[i - i // 2]))
    return found


def conjugate_root(i, n: int):
    """exp(-2 pi i / n), i an int at run time."""
    c, s = root(i, n)
    return c, -s


def get(z: cute.Tensor, i):
    held = cute.make_rmem_tensor((2,), Float32)
    cute.autovec_copy(z[None, i], held)
    return held[0], held[1]


def put(z: cute.Tensor, i, x):
    held = cute.make_rmem_tensor((2,), Float32)
    held[0], held[1] = x
    cute.autovec_copy(held, z[None, i])


def put_words(z: cute.Tensor, i, four):
    """Four numbers in fp16, in a complex number's place."""
    held = cute.recast_tensor(vectors.packed(four, Float16), Int32)
    cute.autovec_copy(held, cute.recast_tensor(z, Int32)[None, i])


def get_words(z: cute.Tensor, i):
    held = cute.make_rmem_tensor((2,), Int32)
    cute.autovec_copy(cute.recast_tensor(z, Int32)[None, i], held)
    return held[0], held[1]


class Given(NamedTuple):
    """taps (H, taps) fp32; spectra and exponents of what they are divided by, of `WholeSequence`."""

    taps: cute.Tensor
    spectra: cute.Tensor
    exponents: cute.Tensor


class FilterSpectra:
    """A thread block has a filter after the other, and makes its spectrum of digits (`digits`) for 16 k1 at a time, in
    shared memory: sums over n1, a and b, each of which a thread has in registers. Taps are read three times, the last
    two from L2.

    No part of a spectrum is larger than the square root of the taps' squares' sum times that of their number: the power
    of 2 below that is what it is divided by. Its exponent goes beyond those of an fp32."""

    def __init__(self, mirrored: bool):
        self.mirrored = mirrored

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        H = fake.sym()
        taps = fake.tensor("fp32", (H, fake.sym()), (fake.sym64(), 1), align=4)
        spectra = fake.tensor("fp16", (H, TILES, 4, tk.WARPGROUP, 8))
        return taps, (spectra, fake.tensor("int32", (H,), align=4)), Int32(0)

    @cute.jit
    def __call__(self, taps: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        self.kernel(Given(taps, *others)).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream,
                                                 min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        al, me = tk.SharedAllocator(), cute.arch.thread_idx()[0]
        z = al.allocate_tensor(Float32, cute.make_layout((2, 2 * EACH * OF_ONE)), 16)
        of_warps = al.allocate_tensor(Float32, cute.make_layout((WARPS, 1 + len(SIZES))), 16)
        for head in cutlass.range(cute.arch.block_idx()[0], g.taps.shape[0], cute.arch.grid_dim()[0], unroll=1):
            exponent = self.size(g, of_warps, head, me)
            if me == 0:
                g.exponents[head] = exponent
            for half in cutlass.range(PASSES, unroll=1):
                self.over_n1(z, (g, head), half, me, exponent)
                tk.sync_block()
                self.over_a(z, me)
                tk.sync_block()
                self.over_b(z, me)
                tk.sync_block()
                self.leave(g, z, (head, half), me)
                tk.sync_block()

    def tap(self, of, n):
        """Without a branch, so that several are under way together. of: (`Given`, head)"""
        (g, head), last = of, cute.size(of[0].taps, mode=[1]) - 1
        found = vectors.run_at(g.taps, (head, cutlass.min(n, last)), 1)[0]
        return cutlass.select_(n <= last, found, Float32(0.0))

    @cute.jit
    def size(self, g: Given, of_warps: cute.Tensor, head, me):
        """The exponent of what the filter's spectrum is divided by. All have done with the filter before."""
        most, squares = Int32(0), cute.make_rmem_tensor((len(SIZES),), Float32)
        squares.fill(0.0)
        for step in cutlass.range(POINTS // (LOADS * THREADS), unroll=1):
            held, first = cute.make_rmem_tensor((LOADS,), Float32), step * (LOADS * THREADS) + me
            for e in cutlass.range_constexpr(LOADS):
                held[e] = self.tap((g, head), first + e * THREADS)
            for e in cutlass.range_constexpr(LOADS):
                most = cutlass.max(most, magnitude(held[e]))
                for i, by in enumerate(SIZES):
                    x = held[e] * Float32(by)
                    squares[i] = squares[i] + x * x
        most = cute.arch.warp_redux_sync(most, "max")
        of_warps[tk.warp_id(), 0] = most.bitcast(Float32)  # the same of all lanes
        for i in cutlass.range_constexpr(len(SIZES)):
            total = squares[i]
            for shift in cutlass.range_constexpr(5):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << shift)
            of_warps[tk.warp_id(), 1 + i] = total
        tk.sync_block()
        most = of_warps[0, 0].bitcast(Int32)
        for w in range(1, WARPS):
            most = cutlass.max(most, of_warps[w, 0].bitcast(Int32))
        totals = [of_warps[0, 1 + i] for i in range(len(SIZES))]
        for w in range(1, WARPS):
            totals = [total + of_warps[w, 1 + i] for i, total in enumerate(totals)]
        small, mid, large = totals
        exponent = most >> EXPONENT
        is_small, is_large = exponent < SMALL, exponent > LARGE
        total = cutlass.select_(is_small, small, cutlass.select_(is_large, large, mid))
        up = cutlass.select_(is_small, Int32(-80), cutlass.select_(is_large, Int32(80), Int32(0)))
        found = ((total * Float32(POINTS)).bitcast(Int32) >> EXPONENT) - BIAS  # a square's
        return cutlass.max((found >> 1) + up + BIAS, LEAST)

    @cute.jit
    def over_n1(self, z: cute.Tensor, of, half, me, exponent):
        """z = of each column 32 a + b the sums over n1 = 8 p + s of w(32)^(n1 (k1 - 1/4)), k1 = 4 m + group, times
        factors: sums over p, factors, a transform over s. Taps are divided, in two steps where one is too small."""
        down = power_of(BIAS - cutlass.min(exponent, MOST))
        rest = power_of(cutlass.min(MOST - exponent, 0))
        for step in cutlass.range(COLUMNS // THREADS, unroll=1):
            column = step * THREADS + me
            taps = [self.tap(of, COLUMNS * n1 + column) * down for n1 in range(DIGITS)]
            steps = conjugate_root(column, POINTS // 4)
            at = column // DIGITS * PADDED + column % DIGITS
            for which in cutlass.range_constexpr(2):
                quarter, x = 4 * (2 * half + which) - 1, []
                of_p = [conjugate_root(quarter * p, 16) for p in range(4)]
                for s in cutlass.range_constexpr(EACH):
                    four = [taps[EACH * p + s] for p in range(4)]
                    sums = [four[0] + four[1] * of_p[1][0] + four[2] * of_p[2][0] + four[3] * of_p[3][0],
                            four[1] * of_p[1][1] + four[2] * of_p[2][1] + four[3] * of_p[3][1]]
                    x.append(times(sums, conjugate_root(quarter * s, 4 * DIGITS)) if s else sums)
                first = tuple(part * rest for part in conjugate_root(quarter * column, 4 * POINTS))
                for m, (y, by) in enumerate(zip(transform(x), powers(steps, EACH), strict=True)):
                    put(z, OF_ONE * (EACH * which + m) + at, times(y, times(first, by) if m else first))

    @cute.jit
    def over_a(self, z: cute.Tensor, me):
        """In place, and times w(1024)^(b ka)."""
        m, b = me // DIGITS, me % DIGITS
        x = transform([get(z, OF_ONE * m + PADDED * a + b) for a in range(DIGITS)])
        for ka, by in enumerate(powers(conjugate_root(b, COLUMNS), DIGITS)):
            put(z, OF_ONE * m + PADDED * ka + b, times(x[ka], by) if ka else x[ka])

    @cute.jit
    def over_b(self, z: cute.Tensor, me):
        """In place, of a k1 and a ka two neighbours kb in fp16 where one was."""
        m, ka = me // DIGITS, me % DIGITS
        x = transform([get(z, OF_ONE * m + PADDED * ka + b) for b in range(DIGITS)])
        sign = -1.0 if self.mirrored else 1.0
        for kb in cutlass.range_constexpr(0, DIGITS, 2):
            four = [x[kb][0], x[kb + 1][0], x[kb][1] * sign, x[kb + 1][1] * sign]
            put_words(z, self.place(m, ka, kb // 2), four)

    def place(self, m, ka, two):
        """Of neighbours kb: what lanes read together has banks of its own."""
        return OF_ONE * m + PADDED * ka + (two + 3 * ka) % (DIGITS // 2)

    @cute.jit
    def leave(self, g: Given, z: cute.Tensor, at, me):
        """Out, tile by tile of two k1 each. at: (head, which half of the k1)"""
        (head, half), u, thread = at, me // tk.WARPGROUP, me % tk.WARPGROUP
        for m in cutlass.range_constexpr(EACH):
            words = cute.make_rmem_tensor((4,), Int32)
            for which in cutlass.range_constexpr(2):
                there = self.place(EACH * which + m, thread // 4, 4 * u + thread % 4)
                words[2 * which], words[2 * which + 1] = get_words(z, there)
            to = vectors.run_at(g.spectra, (head, 2 * m + half, u, thread, 0), 8)
            cute.autovec_copy(words, cute.recast_tensor(to, Int32))
