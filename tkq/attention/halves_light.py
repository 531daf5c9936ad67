"""``HalvesForward`` that leaves a row's maximum, and so O and the norm, as they are until scores go far beyond it."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention import forward, halves
from tkq.attention.halves_consumer import BOTH, KEYS, HalfSoftmax, HalvesConsumer
from tkq.attention.halves_light_config import LightConfig
from tkq.attention.softmax import RIGHT, Softmax
from tkq.attention.spec import AttentionSpec

ROOM = 8.0  # exponents of 2: how far a score may go beyond what stands for the row's maximum


class LightSoftmax(Softmax):
    """``max`` is a score that a row has seen, at most ``ROOM`` (scaled) below its largest. What is subtracted from
    the exponents cancels out in the end, whatever it is: exponentials of up to 2 ** 8 lose nothing in 16 or 32 bits.

    As the bits of a float, read as an integer, grow with it where it is positive, one instruction finds the largest of
    three; of negative ones alone it finds a negative one. So rows are in range if what it finds is, and if 0 is."""

    def first(self, g, c):
        """The first block of a visit."""
        tk.zero(c.norm)
        tk.neg_infty(c.max)
        Softmax.step(self, g, c, 0, 3)

    def step(self, g, c, i, sides):
        """As ``Softmax.step``. Did a row of the warp's get another maximum?"""
        if self.spec.softcap:
            tk.mul(c.att, c.att, g.cap)
            tk.tanh(c.att, c.att)
        if sides:
            self.mask(g, c, i, sides)
        guarded = bool(sides & RIGHT) and bool(self.spec.sides)
        self.scaled(g, c, guarded)
        moved = self.out_of_range(g, c)
        self.move_if(g, c, moved, guarded)
        tk.mul(c.att, c.att, g.scale)
        tk.sub_row(c.att, c.att, c.max_scaled)
        tk.exp2(c.att, c.att)
        tk.row_sum_partial(c.norm, c.att, c.norm)
        return moved

    def scaled(self, g, c, guarded):
        if guarded:
            tk.finite_or_zero(c.max_scaled, c.max)
            tk.mul(c.max_scaled, c.max_scaled, g.scale)
        else:
            tk.mul(c.max_scaled, c.max, g.scale)

    @cute.jit
    def out_of_range(self, g, c):
        found, scores = cutlass.Boolean(False), c.att.rows_view
        for r in cutlass.range_constexpr(2):
            mine = [scores[r, j] for j in range(c.att.cols // 4)]
            low = c.max.tensor[r] * g.scale
            if const_expr(self.config.ints):
                top = largest_of_bits(mine)
                found = found | (low < -ROOM)
            else:
                top = largest(mine)
            found = found | (top * g.scale - low > ROOM)
        return cute.arch.vote_any_sync(found)

    @cute.jit
    def move_if(self, g, c, moved, guarded: Constexpr[bool]):
        """The rows' maxima move on, and what O and the norm so far are owed becomes known."""
        if moved:
            tk.copy(c.correct, c.max)
            tk.row_max(c.max, c.att, c.max)
            if const_expr(guarded):
                tk.finite_or_zero(c.max_scaled, c.max)
            else:
                tk.copy(c.max_scaled, c.max)
            tk.sub(c.correct, c.correct, c.max_scaled)
            tk.mul(c.correct, c.correct, g.scale)
            tk.exp2(c.correct, c.correct)
            tk.mul(c.max_scaled, c.max_scaled, g.scale)
            tk.mul(c.norm, c.norm, c.correct)


class LightHalfSoftmax(LightSoftmax, HalfSoftmax):
    """Of scores of half a tile's keys."""


class LightConsumer(HalvesConsumer):
    """``HalvesConsumer``; O is corrected where a maximum of the warp's rows has moved."""

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.softmax = LightSoftmax(spec, config)
        self.half_softmax = {half: LightHalfSoftmax(spec, config, KEYS[half][0]) for half in KEYS}

    def tile(self, g, s, c, i, sides, seen, before=BOTH, meanwhile=None):
        """As ``HalvesConsumer.tile``."""
        self.pair(g, s, c, seen, before)
        if seen is BOTH:
            moved = self.softmax.step(g, c, i, sides)
        else:
            moved = self.half_softmax[seen].step(g, c.of_half(), i, sides)
        tk.mma_wait(0)
        self.release(s.v_pipe, c.v)
        self.weights(c, seen)
        self.correct_if(c, moved)

    def correct(self, c, late):
        """Nothing: ``correct_if`` does it."""

    @cute.jit
    def correct_if(self, c, moved):
        if moved:
            tk.mul_row(c.o, c.o, c.correct)


class LightHalves(halves.HalvesForward):
    """``HalvesForward`` with ``LightConsumer``. What is left of the softmax for each score is half a comparison, a
    multiplication with a sum, an exponential, a sum and half a conversion."""

    def __init__(self, spec: AttentionSpec, config: LightConfig):
        super().__init__(spec, config)
        self.consumer = LightConsumer(spec, config)


def largest(x):
    """In two chains."""
    even, odd = x[0], x[1]
    for j in range(2, len(x), 2):
        even, odd = cute.arch.fmax(even, x[j]), cute.arch.fmax(odd, x[j + 1])
    return cute.arch.fmax(even, odd)


def largest_of_bits(x):
    """The largest float if one of x is positive, else any of x. Two chains, three at once."""
    bits = [v.bitcast(Int32) for v in x]
    n = len(bits) // 2
    found = [of_three(bits[:n]), of_three(bits[n:])]
    return cutlass.max(*found).bitcast(Float32)


def of_three(bits):
    found = bits[0]
    for j in range(1, len(bits) - 1, 2):
        found = cutlass.max(cutlass.max(found, bits[j]), bits[j + 1])
    return cutlass.max(found, bits[-1]) if len(bits) % 2 == 0 else found


def build(spec: AttentionSpec, config: LightConfig):
    """As ``forward.build``."""
    return LightHalves(spec, config), forward.build(spec, config)[1]
