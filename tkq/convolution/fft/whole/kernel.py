"""y = post * (the causal convolution of pre * u with a filter per head), of up to 32768 tokens in bf16, of which a
thread block has all in shared memory: u is read once, y written once."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.sequences import Place
from tkq.convolution.fft.spec import COLS
from tkq.convolution.fft.transform import TILE
from tkq.convolution.fft.whole import digits
from tkq.convolution.fft.whole.digits import POINTS, SCALES, TILES
from tkq.convolution.fft.whole.steps import MINE, Steps
from tkq.convolution.fft.whole.tokens import WholeTokens
from tkq.runtime.compile import fake
from tkq.tile import vectors

OUTER = POINTS * (SCALES[0] * SCALES[1] * SCALES[2]) ** 2


class Given(NamedTuple):
    """u (B, H, L), the filter's spectrum (H, 16 tiles, 4, 128 threads, 8) fp16 and what it was divided by (H,)
    fp32, as `launch.spectra` makes them, gates and y as u."""

    u: cute.Tensor
    spectrum: cute.Tensor
    divided: cute.Tensor
    pre: Optional[cute.Tensor]
    post: Optional[cute.Tensor]
    y: cute.Tensor


class Shared(NamedTuple):
    """A block's: factors, the sequence, magnitudes of warps."""

    factors: digits.Factors
    tiles: tk.SharedTile
    of_warps: cute.Tensor


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
        self.tokens, self.steps = WholeTokens(spec, tk.element_type(spec.dtype)), Steps()

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any sizes and strides, but of neighbouring tokens."""
        spec, B, H, L = self.spec, fake.sym(), fake.sym(), fake.sym(divisibility=self.spec.vector)

        def operand():
            steps = [fake.sym64(divisibility=spec.vector) for _ in range(2)]
            return fake.tensor(spec.dtype, (B, H, L), (*steps, 1), align=2 * spec.vector)

        gates = [operand() if there else None for there in (spec.pre, spec.post)]
        spectrum = fake.tensor("fp16", (H, TILES, 4, tk.WARPGROUP, 8))
        return operand(), (spectrum, fake.tensor("fp32", (H,)), *gates, operand()), Int32(0)

    @cute.jit
    def __call__(self, u: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind u."""
        self.kernel(Given(u, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        al, n = tk.SharedAllocator(), self.config.warpgroups
        s = Shared(digits.allocate(al), al.tile(TILE, TILES),
                   al.allocate_tensor(Int32, cute.make_layout((4, 1, n)), 16))
        digits.fill(s.factors, cute.arch.thread_idx()[0], self.config.threads)
        tk.publish()
        tk.sync_block()
        columns, asked = digits.of_columns(), self.tokens.asked(g.pre)
        first, step, end = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], g.u.shape[0] * g.u.shape[1]
        self.tokens.ask(asked, g.u, g.pre, self.place(g, first))
        for item in cutlass.range(first, end, step, unroll=1):
            self.sequence(g, s, asked, columns, (self.place(g, item), self.place(g, item + step)))

    def place(self, g: Given, item):
        """Of a sequence; behind the last one, one that is not there."""
        B, H, _ = g.u.shape
        there = item < B * H
        return Place(cutlass.select_(there, item // B, Int32(0)), cutlass.select_(there, item % B, B), Int32(0))

    @cute.jit
    def sequence(self, g: Given, s: Shared, asked, columns: cute.Tensor, places):
        """places: this sequence's, the next one's."""
        (place, following), f, mine = places, s.factors, range(MINE)
        wg, barrier = tk.warpgroup_id(), 1 + tk.warpgroup_id()
        self.tokens.prefetch(g.u, following)
        if const_expr(g.pre is not None):
            self.tokens.prefetch(g.pre, following)
        self.tokens.note(asked, s.of_warps)
        tk.sync_block()  # all have done with the sequence before, too
        most, narrow = self.tokens.largest(s.of_warps), tk.rt(COLS, Float16)
        for i in cutlass.range_constexpr(len(asked)):
            self.tokens.tokens.divided(narrow, asked[i], most, 0)
            tk.store(s.tiles[len(asked) * wg + i], narrow)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)  # which has chunks of its own
        held = [self.steps.forth(s.tiles, f, i) for i in mine]
        tk.sync_block()
        for i in mine:
            self.steps.scatter_frequencies(s.tiles, held[i], i)
        self.publish()
        for i in cutlass.range(MINE, unroll=1):
            t, filters = MINE * wg + i, cute.make_rmem_tensor((4, 4), Int32)
            for u in cutlass.range_constexpr(4):
                there = vectors.run_at(g.spectrum, (place.head, t, u, tk.thread_in_warpgroup(), 0), 8)
                cute.autovec_copy(cute.recast_tensor(there, Int32), filters[None, u])
            self.steps.middle(s.tiles[t], f, filters, columns, barrier)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        held = [self.steps.back(s.tiles, f, i) for i in mine]
        tk.sync_block()
        for i in mine:
            self.steps.scatter_tokens(s.tiles, held[i], i)
        self.publish()
        self.tokens.ask(asked, g.u, g.pre, following)
        factor = self.tokens.factor(most, g.divided[place.head] * Float32(1.0 / OUTER))
        for i in cutlass.range(MINE, unroll=1):
            acc = tk.rt(COLS)
            self.steps.last(acc, s.tiles, f, i)
            tk.mma_wait()
            self.tokens.store(g.y, g.post, acc, factor, place, MINE * wg + i)

    def publish(self):
        """What threads have put into tiles is there for all of the block's products."""
        tk.publish()
        tk.sync_block()
