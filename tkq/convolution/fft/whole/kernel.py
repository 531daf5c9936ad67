"""y = post * (the causal convolution of pre * u with a filter per head), of up to 32768 tokens in bf16, of which a
thread block has all in shared memory: u is read once, y written once."""
import math
from functools import partial
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.operands import Operands
from tkq.convolution.fft.spec import COLS
from tkq.convolution.fft.tables import BIAS
from tkq.convolution.fft.whole import digits
from tkq.convolution.fft.whole.digits import POINTS, SCALES, TILES
from tkq.convolution.fft.whole.forth import Forth, Shared
from tkq.convolution.fft.whole.kept import Kept, fake_kept
from tkq.convolution.fft.whole.steps import MINE, Steps
from tkq.runtime.compile import fake
from tkq.tile import vectors

OUTER = round(math.log2(POINTS * math.prod(SCALES) ** 2))  # the power of 2 that results have too many


class Given(NamedTuple):
    """u (B, H, L), the filter's spectrum (H, 16 tiles, 4, 128 threads, 8) fp16 and the exponent of what it was divided
    by (H,) int32, as `launch.spectra` makes them, gates and y as u; of a spec that keeps them, spectra and exponents of
    `Kept`."""

    u: cute.Tensor
    spectrum: cute.Tensor
    of_filter: cute.Tensor
    pre: Optional[cute.Tensor]
    post: Optional[cute.Tensor]
    y: cute.Tensor
    kept: Optional[cute.Tensor] = None
    exponents: Optional[cute.Tensor] = None


class WholeSequence:
    """A thread block has a sequence after the other, of a head all of them before the next head's. By digits n1, a, b
    of tokens and k1, ka, kb of frequencies (`digits`), P, Q and F matrices of factors in fp16:

        u           -> shared    P X          times factors -> registers, all meet -> shared
        a tile by itself         F X          times factors: the A operand of
                                 A F          times the filter's spectrum: the A operand of
                                 Z F'         times factors, conjugated -> shared
                                 F' X         times factors, conjugated -> registers, all meet -> shared
                                 Q X          -> y

    The next sequence's numbers are loaded while the last products run. Products accumulate in fp32, what is between
    them is fp16. A sequence is divided by a power of 2 near its largest number before, and the filter's spectrum
    likewise: nothing overflows, whatever the numbers' size.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.forth, self.steps = Forth(spec, config), Steps()
        self.tokens = self.forth.tokens

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        operands = Operands(self.spec)
        spectrum = fake.tensor("fp16", (operands.H, TILES, 4, tk.WARPGROUP, 8))
        kept = fake_kept(operands) if self.spec.keeps else ()
        of_filter = spectrum, fake.tensor("int32", (operands.H,), align=4)
        return operands.one(), (*of_filter, *operands.gates(), operands.one(), *kept), Int32(0)

    @cute.jit
    def __call__(self, u: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind u."""
        self.kernel(Given(u, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        s, columns = self.forth.begin(back=True), digits.of_columns()
        asked = self.tokens.asked(g.pre)
        first, step, end = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], g.u.shape[0] * g.u.shape[1]
        self.tokens.ask(asked, g.u, g.pre, self.forth.place(g.u, first))
        for item in cutlass.range(first, end, step, unroll=1):
            places = self.forth.place(g.u, item), self.forth.place(g.u, item + step)
            self.sequence(g, s, asked, columns, places)

    @cute.jit
    def sequence(self, g: Given, s: Shared, asked, columns: cute.Tensor, places):
        """places: this sequence's, the next one's."""
        (place, following), f, mine = places, s.factors, range(MINE)
        wg, barrier = tk.warpgroup_id(), 1 + tk.warpgroup_id()
        most = self.forth.enter(s, asked, (g.u, g.pre), following)
        for i in cutlass.range(MINE, unroll=1):
            t, filters = MINE * wg + i, cute.make_rmem_tensor((4, 4), Int32)
            for u in cutlass.range_constexpr(4):
                there = vectors.run_at(g.spectrum, (place.head, t, u, tk.thread_in_warpgroup(), 0), 8)
                cute.autovec_copy(cute.recast_tensor(there, Int32), filters[None, u])
            leave = None
            if const_expr(self.spec.keeps):
                leave = partial(Kept(g.kept, g.exponents).leave, place, t)
            self.steps.middle(s.tiles[t], f, (filters, columns), barrier, leave)
        if const_expr(self.spec.keeps):
            Kept(g.kept, g.exponents).leave_exponent(place, most)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        held = [self.steps.back(s.tiles, f, i) for i in mine]
        tk.sync_block()
        for i in mine:
            self.steps.scatter_tokens(s.tiles, held[i], i)
        self.forth.publish()
        self.tokens.ask(asked, g.u, g.pre, following)
        scale = self.tokens.scale(most, g.of_filter[place.head] - BIAS - OUTER)
        for i in cutlass.range(MINE, unroll=1):
            acc = tk.rt(COLS)
            self.steps.last(acc, s.tiles, f, i)
            tk.mma_wait()
            self.tokens.store(g.y, g.post, acc, scale, place, MINE * wg + i)
