"""What transforms of columns, forth and back, share: places, factors, largest numbers of many."""
import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.spec import ROWS
from tkq.convolution.fft.tables import EXPONENT, exact_root

EACH = 8  # neighbours that a thread has of a row
LEAST = 12


def turn(i, n):
    """(cos, sin) of 2 pi i / n; n a power of 2, at run time."""
    i = i & (n - 1)
    i = Int32(cutlass.select_(i < n // 2, i, i - n))
    one = ((254 - (Float32(n).bitcast(Int32) >> EXPONENT)) << EXPONENT).bitcast(Float32)  # 1 / n
    angle = Float32(i) * (Float32(2.0 * math.pi) * one)
    return cute.math.cos(angle, fastmath=True), cute.math.sin(angle, fastmath=True)


def times(a, b):
    """Of two complex numbers."""
    return a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]


def of_four(x, back: bool):
    """The sums over a of x[a] exp(-+2 pi i a q / radix), for each q; x: complex numbers, 1, 2 or 4 of them."""
    add, sub = (lambda a, b: (a[0] + b[0], a[1] + b[1])), (lambda a, b: (a[0] - b[0], a[1] - b[1]))
    if len(x) == 1:
        return x
    if len(x) == 2:
        return [add(*x), sub(*x)]
    even, odd, rest, cross = add(x[0], x[2]), add(x[1], x[3]), sub(x[0], x[2]), sub(x[1], x[3])
    turned = (-cross[1], cross[0]) if back else (cross[1], -cross[0])  # times +-i
    return [add(even, odd), add(rest, turned), sub(even, odd), sub(rest, turned)]


def sums(x, back: bool):
    """As `of_four`, of any power of 2: those of every second number, and of the others."""
    n = len(x)
    if n <= 4:
        return of_four(x, back)
    even, odd = sums(x[::2], back), sums(x[1::2], back)
    angles = [(2 if back else -2) * math.pi * q / n for q in range(n // 2)]
    odd = [times(v, (math.cos(angle), math.sin(angle))) for v, angle in zip(odd, angles, strict=True)]
    pairs = list(zip(even, odd, strict=True))
    return [(a[0] + b[0], a[1] + b[1]) for a, b in pairs] + [(a[0] - b[0], a[1] - b[1]) for a, b in pairs]


def powers_of(one, n: int):
    """one, one^2, .. of n of them, each the product of two of half its exponent: errors grow with its logarithm."""
    found = [one]
    for i in range(2, n + 1):
        found.append(times(found[i // 2 - 1], found[i - i // 2 - 1]))
    return found


@cute.jit
def fill_steps(to: cute.Tensor, points, me, threads: cutlass.Constexpr, exact: cutlass.Constexpr = False):
    """to[:, k1] = exp(-2 pi i r j / points) for j = 1 and j = 8, two numbers each; r = k1 - 1/4."""
    of = exact_root if const_expr(exact) else turn
    for k1 in cutlass.range(me, cute.size(to, mode=[1]), threads, unroll=1):
        for n in cutlass.range_constexpr(2):
            c, s = of((4 * k1 - 1) * (8 if n else 1), 4 * points)
            to[2 * n, k1], to[2 * n + 1, k1] = c, -s


def exponent_of(largest):
    """Of a magnitude, from LEAST on: sequences with none above it are brought below 2^LEAST by factors that an fp32
    has."""
    return cutlass.min(cutlass.max(largest >> EXPONENT, LEAST), 253)


@cute.jit
def largest_of(numbers: cute.Tensor):
    """The largest of many ints, from 0 on, in memory. A warp together."""
    most = Int32(0)
    for i in cutlass.range(tk.lane_id(), cute.size(numbers), 32, unroll=1):
        most = cutlass.max(most, numbers[i])
    return cute.arch.warp_redux_sync(most, "max")


def largest_of_few(numbers: cute.Tensor, limit: int):
    """As `largest_of`, of one to `limit` ints, without a loop: its loads and others' are under way together."""
    most, last = Int32(0), cute.size(numbers) - 1
    for i in range(-(-limit // 32)):
        most = cutlass.max(most, numbers[cutlass.min(tk.lane_id() + 32 * i, last)])
    return cute.arch.warp_redux_sync(most, "max")


@cute.jit
def largest_of_warpgroup(most, to: cute.Tensor, barrier):
    """The largest of an int of each thread. to: 4 ints in shared memory, which none reads any more."""
    most = cute.arch.warp_redux_sync(most, "max")
    if tk.lane_id() == 0:
        to[tk.thread_in_warpgroup() // 32] = most
    tk.sync(barrier, tk.WARPGROUP)
    for w in cutlass.range_constexpr(4):
        most = cutlass.max(most, to[w])
    return most


@cute.jit
def load_run(values, sequences, g, at):
    """Neighbours of g.x, as many as there are values, times those of g.gate, fp32; 0 behind the end. at: (head, batch
    index, token)."""
    (head, batch, token), n = at, cute.size(values)
    held = cute.make_rmem_tensor((n,), sequences.dtype)
    sequences.fetch(held, g.x, batch, head, token)
    if const_expr(g.gate is not None):
        by = cute.make_rmem_tensor((n,), sequences.dtype)
        sequences.fetch(by, g.gate, batch, head, token)
        values.store(held.load().to(Float32) * by.load().to(Float32))
    else:
        values.store(held.load().to(Float32))


def place(i, cols: int, each: int = EACH):
    """(row, first column) of a thread's i-th part of a tile."""
    me, across = tk.thread_in_warpgroup(), cols // each
    return me // across + i * (tk.WARPGROUP // across), me % across * each


def parts_of(cols: int, each: int = EACH) -> int:
    """A thread's, of a tile."""
    return ROWS * cols // (tk.WARPGROUP * each)
