"""Whole sequences from memory to the digits of their first transform, which is how all of their kernels begin."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.sequences import Place
from tkq.convolution.fft.spec import COLS
from tkq.convolution.fft.transform import TILE
from tkq.convolution.fft.whole import digits
from tkq.convolution.fft.whole.digits import TILES
from tkq.convolution.fft.whole.steps import MINE, Steps
from tkq.convolution.fft.whole.tokens import WholeTokens


class Shared(NamedTuple):
    """A block's: factors, the sequence, magnitudes of warps."""

    factors: digits.Factors
    tiles: tk.SharedTile
    of_warps: cute.Tensor


class Forth:
    """A thread block has a sequence after the other, of a head all of them before the next head's. The next one's
    numbers are in L2 while this one is transformed, and `asked` for before its last products."""

    def __init__(self, spec, config):
        self.config, self.steps = config, Steps()
        self.tokens = WholeTokens(spec, tk.element_type(spec.dtype))

    @cute.jit
    def begin(self, back: cutlass.Constexpr):
        """A block's shared memory, its factors filled: back, also those of the way back."""
        al = tk.SharedAllocator()
        s = Shared(digits.allocate(al, back), al.tile(TILE, TILES),
                   al.allocate_tensor(Int32, cute.make_layout((4, 1, self.config.warpgroups)), 16))
        digits.fill(s.factors, cute.arch.thread_idx()[0], self.config.threads)
        self.publish()
        return s

    def publish(self):
        """What threads have put into tiles is there for all of the block's products."""
        tk.publish()
        tk.sync_block()

    def place(self, x: cute.Tensor, item):
        """Of a sequence; behind the last one, one that is not there."""
        B, H, _ = x.shape
        there = item < B * H
        return Place(cutlass.select_(there, item // B, Int32(0)), cutlass.select_(there, item % B, B), Int32(0))

    @cute.jit
    def enter(self, s: Shared, asked, operands, following: Place):
        """What was asked for, transformed over n1, in tiles of two k1 each; its largest magnitude. operands: (u,
        its gate), of which the following one comes into L2."""
        f, wg, mine = s.factors, tk.warpgroup_id(), range(MINE)
        for x in operands:
            if const_expr(x is not None):
                self.tokens.prefetch(x, following)
        self.tokens.note(asked, s.of_warps)
        tk.sync_block()  # all have done with the sequence before, too
        most, narrow = self.tokens.largest(s.of_warps), tk.rt(COLS, Float16)
        for i in cutlass.range_constexpr(len(asked)):
            self.tokens.tokens.divided(narrow, asked[i], most, 0)
            tk.store(s.tiles[len(asked) * wg + i], narrow)
        tk.publish()
        tk.sync(1 + wg, tk.WARPGROUP)  # which has chunks of its own
        held = [self.steps.forth(s.tiles, f, i) for i in mine]
        tk.sync_block()
        for i in mine:
            self.steps.scatter_frequencies(s.tiles, held[i], i)
        self.publish()
        return most
