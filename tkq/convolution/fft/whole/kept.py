"""Spectra of whole sequences in memory, of which a filter's gradient is made."""
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.convolution.fft.operands import Operands
from tkq.convolution.fft.tables import EXPONENT
from tkq.convolution.fft.whole.digits import TILES
from tkq.convolution.fft.whole.steps import QUARTERS, of_thread
from tkq.runtime.compile import fake
from tkq.tile import vectors


class Kept(NamedTuple):
    """spectra (H, B, 16 tiles, 4, 128 threads, 8) fp16, each as a filter's (`launch.spectra`), of sequences divided by
    a power of 2 near their largest number; exponents (H, B) int32, that number's, as an fp32 has it: of NaN and
    infinities 255."""

    spectra: cute.Tensor
    exponents: cute.Tensor

    @cute.jit
    def leave_exponent(self, place, most):
        """A block's threads together. most: magnitudes, as an fp32's bits."""
        if cute.arch.thread_idx()[0] == 0:
            self.exponents[place.head, place.batch] = most[0, 0] >> EXPONENT

    def leave(self, place, t, words):
        """A thread's part of tile t: the words of its numbers (`tkq.tile.halves.narrow_words`)."""
        for u in QUARTERS:
            held = cute.make_rmem_tensor((4,), Int32)
            for i, word in enumerate(of_thread(words, u)):
                held[i] = word
            there = vectors.run_at(self.spectra, (place.head, place.batch, t, u, tk.thread_in_warpgroup(), 0), 8)
            cute.autovec_copy(held, cute.recast_tensor(there, Int32))


def fake_kept(operands: Operands) -> Kept:
    H, B = operands.H, operands.B
    return Kept(fake.tensor("fp16", (H, B, TILES, 4, tk.WARPGROUP, 8)), fake.tensor("int32", (H, B), align=4))
