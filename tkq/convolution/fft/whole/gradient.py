"""The spectrum of a filter's gradient, of whole sequences: of each head the sum over its sequences of conj(V) W, the
spectra of v = pre * u and w = post * dy."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.filter_gradient import BIAS, FIRST, LAST
from tkq.convolution.fft.sequences import Place
from tkq.convolution.fft.spec import COLS
from tkq.convolution.fft.tables import EXPONENT, power_of, power_of_two
from tkq.convolution.fft.transform import TILE
from tkq.convolution.fft.whole import digits
from tkq.convolution.fft.whole.digits import DIGITS, HALF, TURNS, row_of
from tkq.convolution.fft.whole.steps import HALVES, QUARTERS, Steps, real
from tkq.convolution.fft.whole.tokens import WholeTokens
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.halves import complex_times, narrow_words, numbers

TILES = 8  # of a half's k1, two each
MINE = 2  # of them, and of tiles of tokens, that a warpgroup has
RUNS = 8  # of four numbers that a thread has of a tile
ABOVE = 7  # inputs are brought below 2^8: spectra, of a length of at most 2^7 times that, stay below 65504
SCALE = 16  # the power of 2 that both spectra lack, by the scales of three factors each


class Given(NamedTuple):
    """u, dy (B, H, L) and their gates; sums (H, parts, 16 tiles, 8, 128, 4) fp32; parts in which a head's sequences go
    to blocks."""

    u: cute.Tensor
    dy: cute.Tensor
    pre: Optional[cute.Tensor]
    post: Optional[cute.Tensor]
    sums: cute.Tensor
    parts: Int32


class Shared(NamedTuple):
    """A block's: factors of a half of the k1, tiles of tokens and then of two k1 each, sums (4, threads, 8, 8 tiles),
    magnitudes of warps."""

    factors: digits.Factors
    tiles: tk.SharedTile
    sums: cute.Tensor
    of_warps: cute.Tensor


class WholeFilterGradient:
    """A block has half of the digits k1 (`digits`), of a head after the other, and then the other half: as many sums
    of products as its shared memory has room for beside a tile of those k1 of one sequence. V stays in registers while
    w is transformed. Each sequence is divided by a power of 2 near its largest number, which the product gets back."""

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
        sums = fake.tensor("fp32", (H, fake.sym(), 2 * TILES, RUNS, tk.WARPGROUP, 4))
        return operand(), (operand(), *gates, sums, Int32(0)), Int32(0)

    @cute.jit
    def __call__(self, u: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind u."""
        self.kernel(Given(u, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        al, n, me = tk.SharedAllocator(), self.config.warpgroups, cute.arch.thread_idx()[0]
        tiles = al.tile(TILE, TILES)
        s = Shared(digits.allocate(al, HALF), tiles,
                   al.allocate_tensor(Float32, cute.make_layout((4, tk.WARPGROUP, RUNS, TILES)), 16),
                   al.allocate_tensor(Int32, cute.make_layout((4, 1, n)), 16))
        columns, grid = digits.of_columns(), cute.arch.grid_dim()[0]
        each = g.u.shape[1] * g.parts
        for half in cutlass.range(2, unroll=1):
            tk.sync_block()  # all have done with the half before
            digits.fill_half(s.factors, half, me, self.config.threads)
            tk.publish()
            tk.sync_block()
            first = (cute.arch.block_idx()[0] + half * (grid - each % grid)) % grid  # blocks go on in turn
            for item in cutlass.range(first, each, grid, unroll=1):
                self.head(g, s, columns, (item // g.parts, item % g.parts, half))

    @cute.jit
    def head(self, g: Given, s: Shared, columns: cute.Tensor, at):
        """The sums of a part of a head's sequences. at: (head, part, half)"""
        (head, part, half), wg, me = at, tk.warpgroup_id(), tk.thread_in_warpgroup()
        for i in cutlass.range_constexpr(MINE):
            for run in cutlass.range_constexpr(RUNS):
                s.sums[None, me, run, MINE * wg + i].fill(0.0)
        for batch in cutlass.range(part, g.u.shape[0], g.parts, unroll=1):
            place, following = Place(head, batch, Int32(0)), Place(head, batch + g.parts, Int32(0))
            for x in (g.u, g.dy, g.pre, g.post):
                if const_expr(x is not None):
                    self.tokens.prefetch(x, following)
            of_v, kept = self.forth(g.u, g.pre, s, place), []
            for i in cutlass.range_constexpr(MINE):
                acc, narrow = tk.rt(COLS), tk.rt(COLS, Float16)
                self.steps.spectrum(acc, narrow, s.tiles[MINE * wg + i], s.factors, columns)
                tk.mma_wait()
                kept.append(narrow_words(acc))
            of_w = self.forth(g.dy, g.post, s, place)
            by = power_of_two(of_v + of_w - 2 * (BIAS + ABOVE) + SCALE)
            for i in cutlass.range_constexpr(MINE):
                acc, narrow = tk.rt(COLS), tk.rt(COLS, Float16)
                self.steps.spectrum(acc, narrow, s.tiles[MINE * wg + i], s.factors, columns)
                tk.mma_wait()
                self.add(s.sums[None, me, None, MINE * wg + i], kept[i], acc, by)
        for i in cutlass.range_constexpr(MINE):
            for run in cutlass.range_constexpr(RUNS):
                at = head, part, TILES * half + MINE * wg + i, run, me, 0
                cute.autovec_copy(s.sums[None, me, run, MINE * wg + i], vectors.run_at(g.sums, at, 4))

    @cute.jit
    def forth(self, x: cute.Tensor, gate: Optional[cute.Tensor], s: Shared, place: Place):
        """A sequence's transform over n1 to a half of the k1, in the tiles; the exponent of its largest number."""
        asked, narrow, f, wg = self.tokens.asked(gate), tk.rt(COLS, Float16), s.factors, tk.warpgroup_id()
        self.tokens.ask(asked, x, gate, place)
        self.tokens.note(asked, s.of_warps)
        tk.sync_block()  # all have done with the tiles, too
        exponent = self.tokens.largest(s.of_warps)[0, 0] >> EXPONENT
        exponent = cutlass.min(cutlass.max(exponent, FIRST), LAST)
        by = cute.make_rmem_tensor((1, 2), Float32)
        by.fill(power_of(BIAS + ABOVE - exponent))
        for i in cutlass.range_constexpr(MINE):
            self.tokens.tokens.scaled(narrow, asked[i], by)
            tk.store(s.tiles[MINE * wg + i], narrow)
        tk.publish()
        tk.sync(1 + wg, tk.WARPGROUP)  # which has tiles of its own
        held = [self.over_n1(s.tiles, f, i) for i in HALVES]
        tk.sync_block()
        for i in cutlass.range_constexpr(MINE):
            self.scatter(s.tiles, held[i], i)
        tk.publish()
        tk.sync_block()
        return exponent

    def chunk(self, i):
        """Of a warpgroup's i-th tile of tokens: that of a thread's rows, of two."""
        return 2 * (MINE * tk.warpgroup_id() + i) + tk.thread_in_warpgroup() // 64

    def over_n1(self, tiles, f: digits.Factors, i: int):
        """As `Steps.forth`, of a tile of tokens and 16 k1."""
        acc = tk.rt(COLS)
        tk.mm_AB(acc, f.first, tiles[MINE * tk.warpgroup_id() + i])
        tk.mma_wait()
        words, k1 = narrow_words(acc), digits.digit_of(tk.first_row())[0] % HALF
        columns, found = digits.columns_of(f, k1), []
        for half in HALVES:
            by = digits.between(f, columns, k1, 2 * self.chunk(i) + half)
            found.append([complex_times(real(words, half, u), by[u]) for u in QUARTERS])
        return found

    def scatter(self, tiles, held, i: int):
        """As `Steps.scatter_frequencies`."""
        lane = tk.lane_id()
        k1 = tk.thread_in_warpgroup() // 32 % 2 * 8 + lane % 8
        for half in HALVES:
            a = (2 * self.chunk(i) + half + k1 // 2 % TURNS) & (DIGITS - 1)
            self.steps.scatter(tiles[k1 // 2], held[half], row_of(a, lane // 8 % 2), 4 * (k1 % 2) + lane // 16)

    def add(self, sums: cute.Tensor, kept, acc: tk.RegTile, by):
        """sums (4, 8) += by * conj(V) * W of a tile; kept: V's words."""
        for u in QUARTERS:
            for half in HALVES:
                there, four = sums[None, 2 * u + half], cute.make_rmem_tensor((4,), Float32)
                cute.autovec_copy(there, four)
                real_at, imag_at = 2 * u + half, 2 * (4 + u) + half
                v, turned = numbers(kept[real_at]), numbers(kept[imag_at])
                for e in range(2):
                    x, y = acc.tensor[2 * real_at + e], acc.tensor[2 * imag_at + e]
                    four[e] = four[e] + by * (v[e] * x + turned[e] * y)
                    four[2 + e] = four[2 + e] + by * (v[e] * y - turned[e] * x)
                cute.autovec_copy(four, there)


