"""A transform of up to 4096 complex numbers in fp32, for filters and their gradients: each head has one, little beside
those of its sequences."""
import math

import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk
from tkq.convolution.fft.tables import root

EACH = 8  # numbers of a thread


class Room:
    """Where threads of a block exchange numbers, and leave them: in shared memory, of fp32 (2, padded), from number
    `first` on."""

    def __init__(self, numbers: cute.Tensor, first=0):
        self.numbers, self.first = numbers, first

    @staticmethod
    def padded(points: int) -> int:
        """Numbers that there must be room for: one more after each 8, so that threads 8 apart meet other banks."""
        return points + points // 8

    def put(self, i, x):
        """Number i = x, (real part, imaginary part)."""
        held = cute.make_rmem_tensor((2,), Float32)
        held[0], held[1] = x
        cute.autovec_copy(held, self.numbers[None, self.first + i + i // 8])

    def get(self, i):
        held = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(self.numbers[None, self.first + i + i // 8], held)
        return held[0], held[1]

    def meet(self):
        tk.sync_block()


class Radix:
    """By points / 8 threads, which have 8 numbers each: before and after, the n-th of thread `me` is number
    me + n points / 8. Butterflies of 8, the last ones of what is left, each of which leaves its numbers where the next
    ones find them in order (Stockham's). inverse: without the division by `points`. root: as `tables.root`."""

    def __init__(self, points: int, inverse: bool = False, root=root):
        self.points, self.inverse, self.root = points, inverse, root
        self.threads, self.radices = points // EACH, []
        while points > 1:
            self.radices.append(min(8, points))
            points //= self.radices[-1]

    def run(self, held: list, room, me) -> list:
        """held: pairs (real part, imaginary part). room: for as many numbers; the block's threads meet before it is
        written and before it is read."""
        stride = 1
        for radix in self.radices:
            held = self.step(held, radix, stride, me)
            if stride * radix < self.points:
                room.meet()
                for n, x in enumerate(held):
                    room.put(self.place(n, radix, stride, me), x)
                room.meet()
                held = [room.get(me + n * self.threads) for n in range(EACH)]
            stride *= radix
        return held

    def place(self, n: int, radix: int, stride: int, me):
        """Where the n-th number of a thread goes."""
        many = EACH // radix
        j = me + n % many * self.threads
        return j // stride * (stride * radix) + j % stride + n // many * stride

    def step(self, held, radix, stride, me):
        many, found = EACH // radix, list(held)
        for m in range(many):
            values = held[m::many]
            if stride > 1:
                c, s = self.root((me + m * self.threads) % stride, stride * radix)
                one = by = (c, s if self.inverse else -s)
                for n in range(1, radix):
                    values[n] = times(values[n], by)
                    by = times(by, one)
            found[m::many] = self.butterfly(values)
        return found

    def butterfly(self, v):
        """The transform of a few."""
        if len(v) == 1:
            return v
        half = len(v) // 2
        near, far = v[:half], v[half:]
        found = [None] * len(v)
        found[::2] = self.butterfly([(a + c, b + d) for (a, b), (c, d) in zip(near, far, strict=True)])
        found[1::2] = self.butterfly([self.turned((a - c, b - d), 8 * i // len(v))
                                      for i, ((a, b), (c, d)) in enumerate(zip(near, far, strict=True))])
        return found

    def turned(self, x, eighths: int):
        """x, by so many eighths of a turn, up to 3; forth clockwise."""
        a, b = x
        if eighths >= 2:
            a, b = (-b, a) if self.inverse else (b, -a)
        if eighths % 2:
            a, b = (a - b, a + b) if self.inverse else (a + b, b - a)
            a, b = a * math.sqrt(0.5), b * math.sqrt(0.5)
        return a, b


def times(x, y):
    """A complex product."""
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]
