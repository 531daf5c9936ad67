"""Spectra of sequences of up to 32768 tokens in bf16, where the filter's gradient alone is asked for."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32

import tkq.tile as tk
from tkq.convolution.fft.operands import Operands
from tkq.convolution.fft.spec import COLS
from tkq.convolution.fft.whole import digits
from tkq.convolution.fft.whole.forth import Forth, Shared
from tkq.convolution.fft.whole.kept import Kept, fake_kept
from tkq.convolution.fft.whole.steps import MINE, Steps
from tkq.tile.halves import narrow_words


class Given(NamedTuple):
    """u (B, H, L), its gate; spectra and exponents of `Kept`."""

    u: cute.Tensor
    pre: Optional[cute.Tensor]
    spectra: cute.Tensor
    exponents: cute.Tensor


class WholeSpectra:
    """As `kernel.WholeSequence`, forth alone."""

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.forth, self.steps = Forth(spec, config), Steps()

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        operands = Operands(self.spec)
        return operands.one(), (operands.gates()[0], *fake_kept(operands)), Int32(0)

    @cute.jit
    def __call__(self, u: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind u."""
        self.kernel(Given(u, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        s, columns = self.forth.begin(back=False), digits.of_columns()
        asked = self.forth.tokens.asked(g.pre)
        first, step, end = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], g.u.shape[0] * g.u.shape[1]
        self.forth.tokens.ask(asked, g.u, g.pre, self.forth.place(g.u, first))
        for item in cutlass.range(first, end, step, unroll=1):
            places = self.forth.place(g.u, item), self.forth.place(g.u, item + step)
            self.sequence(g, s, asked, columns, places)

    @cute.jit
    def sequence(self, g: Given, s: Shared, asked, columns: cute.Tensor, places):
        """places: this sequence's, the next one's."""
        (place, following), kept = places, Kept(g.spectra, g.exponents)
        kept.leave_exponent(place, self.forth.enter(s, asked, (g.u, g.pre), following))
        self.forth.tokens.ask(asked, g.u, g.pre, following)
        for i in cutlass.range(MINE, unroll=1):
            t, acc, narrow = MINE * tk.warpgroup_id() + i, tk.rt(COLS), tk.rt(COLS, Float16)
            self.steps.spectrum(acc, narrow, s.tiles[t], s.factors, columns)
            tk.mma_wait()
            kept.leave(place, t, narrow_words(acc))
