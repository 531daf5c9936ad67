"""A thread's channels: their weights in registers, and the products with inputs of earlier tokens."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..tile import vectors
from .heads import Normed


def fma(a, b, c):
    return cute.math.fma(a, b, c)


class Column(NamedTuple):
    """A thread's channels of one sequence of x (B, S, C): the address of token 0's, in bytes, and from one token to the
    next. A product of 32-bit numbers, which the hardware adds to 64 bits in one instruction, finds a token."""

    start: Any
    step: Any


def column(x, batch, channel) -> Column:
    size = x.element_type.width // 8
    start = x.iterator.toint() + (Int64(batch) * x.stride[0] + Int64(channel)) * size
    return Column(start, Int32(x.stride[1]) * size)


def line(x, batch, channel) -> Column:
    """Likewise of a channel whose tokens are neighbours."""
    size = x.element_type.width // 8
    return Column(x.iterator.toint() + (Int64(batch) * x.stride[0] + Int64(channel) * x.stride[2]) * size, Int32(size))


def row(x, of: Column, t, vector):
    """Token t's `vector` channels, or of a `line` as many tokens from it on."""
    address = of.start + Int64(t) * Int64(of.step)
    pointer = cute.make_ptr(x.element_type, address, x.memspace, assumed_align=x.iterator.alignment)
    return cute.make_tensor(pointer, cute.make_layout(vector))


def load_rows(x, of: Column, tokens, vector):
    """Rows of some tokens, each in registers: all loads before any is used."""
    return [vectors.load(row(x, of, t, vector)) for t in tokens]


class Taps:
    """width taps of `vector` neighbouring channels. Lists of taps are in the order of the weight: the last is the one
    of the token itself, `d` tokens back is tap width - 1 - d."""

    def __init__(self, spec):
        self.width, self.vector, self.ahead, self.head = spec.width, spec.vector, spec.width - 1, spec.head

    def of(self, g, channel, normed):
        """(weights, bias, the norm of the channels' head or None)."""
        norm = Normed(channel, g.normed, self.head // self.vector) if normed else None
        return self.weights(g.weight, channel), self.bias(g.bias, channel), norm

    def weights(self, weight, channel):
        """weight[channel + e, i] as fp32: a list of taps, each a list of channels."""
        n = self.width * self.vector
        if n * weight.element_type.width % 128 == 0:  # rows follow each other
            held = vectors.wide(vectors.load(vectors.run_at(weight, (channel, Int32(0)), n)))
            return [[held[e * self.width + i] for e in range(self.vector)] for i in range(self.width)]
        return [[Float32(weight[channel + e, i]) for e in range(self.vector)] for i in range(self.width)]

    def bias(self, bias, channel):
        return [Float32(0.0 if bias is None else bias[channel + e]) for e in range(self.vector)]

    def sums(self, rows, weights, bias):
        """bias + the products of weights with the width rows."""
        found = list(bias)
        for row, weight in zip(rows, weights, strict=True):
            found = [fma(x, w, y) for x, w, y in zip(row, weight, found, strict=True)]
        return found

    def seen(self, rows, age, before):
        """The width rows up to a token of this age (its place in its sequence), with the state where a row would be
        before the sequence. before(column): that column of the state, a list."""
        result = []
        for i, row in enumerate(rows):
            back = self.ahead - i
            if back == 0:
                result.append(row)
            else:
                state = before(cutlass.min(i + age, self.ahead - 1))
                result.append([cutlass.select_(age >= back, x, s) for x, s in zip(row, state, strict=True)])
        return result


def state_column(state, of, vector):
    """What `Taps.seen` asks for: of states (row, channel, column); zeros without them. of: (row, channel)."""
    def before(column):
        if state is None:
            return [Float32(0.0)] * vector
        row, channel = of
        return [Float32(state[row, channel + e, column]) for e in range(vector)]

    return before
