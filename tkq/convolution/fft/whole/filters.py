"""Spectra of filters of up to 32768 taps at frequencies k - 1/4, in float32, as `kernel.WholeSequence` takes them."""
import math
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

import tkq.tile as tk
from tkq.convolution.fft.tables import EXPONENT, magnitude, root
from tkq.convolution.fft.whole.digits import DIGITS, PADDED, POINTS, TILES
from tkq.runtime.compile import fake
from tkq.tile import vectors

THREADS = 256
WARPS = THREADS // 32
GROUPS = 4  # of 8 digits k1 = 4 m + group
EACH = 8
LOADS = 32  # of a thread, under way together
COLUMNS = POINTS // DIGITS  # 32 a + b
OF_ONE = DIGITS * PADDED  # numbers of a k1, in rows of 32
LEAST, MOST = 2, 253  # exponents of a power of 2 that is finite, as its inverse is


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


class Given(NamedTuple):
    """taps (H, taps) fp32; spectra and what they are divided by, of `WholeSequence`."""

    taps: cute.Tensor
    spectra: cute.Tensor
    divided: cute.Tensor


class Shared(NamedTuple):
    """A filter's taps, numbers of 8 k1, the warps' sums."""

    taps: cute.Tensor
    z: cute.Tensor
    of_warps: cute.Tensor


class FilterSpectra:
    """A thread block has a filter after the other in shared memory, and makes its spectrum of digits (`digits`) for 8
    k1 at a time: sums over n1, a and b, each of which a thread has in registers.

    No part of a spectrum is larger than the square root of the taps' squares' sum times that of their number: the power
    of 2 below that is what it is divided by. Fp16's range has room for what of that is too much."""

    def __init__(self, mirrored: bool):
        self.mirrored = mirrored

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        H = fake.sym()
        taps = fake.tensor("fp32", (H, fake.sym()), (fake.sym64(), 1), align=4)
        return taps, (fake.tensor("fp16", (H, TILES, 4, tk.WARPGROUP, 8)), fake.tensor("fp32", (H,))), Int32(0)

    @cute.jit
    def __call__(self, taps: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        self.kernel(Given(taps, *others)).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream,
                                                 min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        al, me = tk.SharedAllocator(), cute.arch.thread_idx()[0]
        s = Shared(al.allocate_tensor(Float32, cute.make_layout(POINTS), 16),
                   al.allocate_tensor(Float32, cute.make_layout((2, EACH * OF_ONE)), 16),
                   al.allocate_tensor(Float32, cute.make_layout((WARPS, 2)), 16))
        for head in cutlass.range(cute.arch.block_idx()[0], g.taps.shape[0], cute.arch.grid_dim()[0], unroll=1):
            exponent = self.load(g, s, head, me)
            if me == 0:
                g.divided[head] = (exponent << EXPONENT).bitcast(Float32)
            down = ((254 - exponent) << EXPONENT).bitcast(Float32)
            for group in cutlass.range(GROUPS, unroll=1):
                self.over_n1(s.z, s.taps, group, me, down)
                tk.sync_block()
                self.over_a(s.z, me)
                tk.sync_block()
                self.over_b(g, s.z, head, group, me)
                tk.sync_block()

    @cute.jit
    def load(self, g: Given, s: Shared, head, me):
        """The taps, and the exponent of what their spectrum is divided by. All have done with the ones before."""
        taps, most = cute.size(g.taps, mode=[1]), Int32(0)
        for step in cutlass.range(POINTS // (LOADS * THREADS), unroll=1):
            held, first = cute.make_rmem_tensor((LOADS,), Float32), step * (LOADS * THREADS) + me
            for e in cutlass.range_constexpr(LOADS):  # without branches: all of them are under way together
                held[e] = vectors.run_at(g.taps, (head, cutlass.min(first + e * THREADS, taps - 1)), 1)[0]
            for e in cutlass.range_constexpr(LOADS):
                held[e] = cutlass.select_(first + e * THREADS < taps, held[e], Float32(0.0))
                s.taps[first + e * THREADS] = held[e]
                most = cutlass.max(most, magnitude(held[e]))
        most = cute.arch.warp_redux_sync(most, "max")
        for other in self.all_of(s.of_warps[None, 0], most.bitcast(Float32)):
            most = cutlass.max(most, other.bitcast(Int32))
        largest = cutlass.min(cutlass.max(most >> EXPONENT, LEAST), MOST)
        total = self.squares(s, ((254 - largest) << EXPONENT).bitcast(Float32), me)
        size = ((total * Float32(POINTS)).bitcast(Int32) >> EXPONENT) - 127  # a square's
        return cutlass.min(cutlass.max(largest + (size >> 1), LEAST), MOST)

    @cute.jit
    def squares(self, s: Shared, down, me):
        """The sum of the taps' squares, each times down."""
        total = Float32(0.0)
        for step in cutlass.range(POINTS // (LOADS * THREADS), unroll=1):
            for e in cutlass.range_constexpr(LOADS):
                x = s.taps[step * (LOADS * THREADS) + e * THREADS + me] * down
                total = total + x * x
        for shift in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << shift)
        found = self.all_of(s.of_warps[None, 1], total)
        return sum(found[1:], found[0])

    def all_of(self, to: cute.Tensor, x):
        """What each warp has, in shared memory; they meet."""
        to[tk.warp_id()] = x  # the same of all lanes
        tk.sync_block()
        return [to[w] for w in range(WARPS)]

    @cute.jit
    def over_n1(self, z: cute.Tensor, taps: cute.Tensor, group, me, down):
        """z = of each column 32 a + b the sums over n1 = 8 p + s of w(32)^(n1 (k1 - 1/4)), k1 = 4 m + group, times
        factors: sums over p, factors, a transform over s."""
        quarter = 4 * group - 1
        of_p = [conjugate_root(quarter * p, 16) for p in range(4)]
        of_s = [conjugate_root(quarter * s, 4 * DIGITS) for s in range(EACH)]
        for step in cutlass.range(COLUMNS // THREADS, unroll=1):
            x, column = [], step * THREADS + me
            for s in cutlass.range_constexpr(EACH):
                four = [taps[COLUMNS * (EACH * p + s) + column] * down for p in range(4)]
                sums = [four[0] + four[1] * of_p[1][0] + four[2] * of_p[2][0] + four[3] * of_p[3][0],
                        four[1] * of_p[1][1] + four[2] * of_p[2][1] + four[3] * of_p[3][1]]
                x.append(times(sums, of_s[s]) if s else sums)
            first, steps = conjugate_root(quarter * column, 4 * POINTS), conjugate_root(column, POINTS // 4)
            at = column // DIGITS * PADDED + column % DIGITS
            for m, (y, by) in enumerate(zip(transform(x), powers(steps, EACH), strict=True)):
                put(z, OF_ONE * m + at, times(y, times(first, by) if m else first))

    @cute.jit
    def over_a(self, z: cute.Tensor, me):
        """In place, and times w(1024)^(b ka)."""
        m, b = me // DIGITS, me % DIGITS
        x = transform([get(z, OF_ONE * m + PADDED * a + b) for a in range(DIGITS)])
        for ka, by in enumerate(powers(conjugate_root(b, COLUMNS), DIGITS)):
            put(z, OF_ONE * m + PADDED * ka + b, times(x[ka], by) if ka else x[ka])

    @cute.jit
    def over_b(self, g: Given, z: cute.Tensor, head, group, me):
        """Out: of a k1 and a ka two neighbours kb at a time."""
        m, ka = me // DIGITS, me % DIGITS
        x = transform([get(z, OF_ONE * m + PADDED * ka + b) for b in range(DIGITS)])
        sign = -1.0 if self.mirrored else 1.0
        for kb in cutlass.range_constexpr(0, DIGITS, 2):
            four = vectors.packed([x[kb][0], x[kb + 1][0], x[kb][1] * sign, x[kb + 1][1] * sign], Float16)
            at = head, 2 * m + group // 2, kb // 8, 4 * ka + kb % 8 // 2, 4 * (group % 2)
            cute.autovec_copy(four, vectors.run_at(g.spectra, at, 4))
