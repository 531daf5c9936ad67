"""y = post * (the convolution of pre * u with a filter per head), of one block of tokens or, in bf16, of two, all of
which a warpgroup has in registers before; operands of products are fp16."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.halves import Halves
from tkq.convolution.fft.kernel import FftConv, Given
from tkq.convolution.fft.sequences import Place
from tkq.convolution.fft.spec import COLS, COLUMN_SCALE, ROWS, row_scale
from tkq.convolution.fft.tables import Tables, of_head
from tkq.convolution.fft.tokens import Tokens
from tkq.convolution.fft.transform import TILE, Factors
from tkq.tile import woven


class Shared(NamedTuple):
    """A block's: factors, spectra of the filter's parts, ints for their largest number. A warpgroup's: two tiles in
    between and those of the input, magnitudes of its warps, of two blocks the first one's spectrum."""

    factors: Factors
    spectra: cute.Tensor
    largest: cute.Tensor
    tiles: tk.SharedTile
    of_warps: cute.Tensor
    before: Optional[cute.Tensor]


class Work(NamedTuple):
    """Of a warpgroup: its number, head, first tile of a part of that, and those of the part after that."""

    wg: Int32
    head: Int32
    first: Int32
    next_head: Int32
    next_first: Int32


class InRegisters:
    """A block has a head after the other, each warpgroup a tile of its sequences after the other. Of a circular
    convolution two sequences are a complex one, whose parts a real filter keeps apart.

        u  -> shared   F X      accumulators, times twiddles, sums and differences, rounded: the A operands of
                       A F, D G, times the filter's spectrum, rounded: the A operands of
                       Z F', Y G', sums and differences, times twiddles, conjugated, rounded -> shared
                       F' B     -> y

    F and G are matrices of roots of unity in fp16, products accumulate in fp32. Each sequence is divided by a power of
    2 near its largest number before, and the filter's spectrum likewise: nothing overflows, whatever the numbers' size.
    A tile's numbers are loaded while the last product of the tile before runs. Two blocks are as in `BlockedFftConv`.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.tables, self.transform = Tables(spec, config.threads, halves=True), Halves(spec)
        self.tokens = Tokens(spec, tk.element_type(spec.dtype))

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        return FftConv(self.spec, self.config).fake_arguments()

    @cute.jit
    def __call__(self, u: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind u."""
        self.kernel(Given(u, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        al, n, wg = tk.SharedAllocator(), self.config.warpgroups, tk.warpgroup_id()
        factors, spectra, before = self.transform.factors(al), self.transform.spectra(al, self.spec.blocks), None
        tiles = al.tile(TILE, (self.spec.tiles + 2) * n)
        largest = al.allocate_tensor(Int32, cute.make_layout(4 * n), 16)
        of_warps = al.allocate_tensor(Int32, cute.make_layout((4, self.spec.tiles, n)), 16)
        self.transform.fill(factors, self.tables, cute.arch.thread_idx()[0])
        tk.publish()
        if const_expr(self.spec.blocks > 1):
            before = self.transform.spectra(al, n)[None, None, None, wg]
        s = Shared(factors, spectra, largest, tiles, of_warps[None, None, wg], before)
        asked = [self.tokens.asked(g.pre) for _ in range(self.spec.tiles * self.spec.blocks)]
        heads, step = g.u.shape[1] * g.splits, cute.arch.grid_dim()[0]
        first = cute.arch.block_idx()[0]
        head, tile = self.of_item(g, first, wg)
        self.ask(g, asked, head, tile)
        for item in cutlass.range(first, heads, step, unroll=1):
            head, tile = self.of_item(g, item, wg)
            self.head(g, s, asked, Work(wg, head, tile, *self.of_item(g, item + step, wg)))

    def of_item(self, g: Given, item, wg):
        """(head, first tile) of a warpgroup; behind the last one a tile that is not there."""
        head, part = item // g.splits, item % g.splits
        there = head < g.u.shape[1]
        return (cutlass.select_(there, head, Int32(0)),
                cutlass.select_(there, part * self.config.warpgroups + wg, g.u.shape[0]))

    def ask(self, g: Given, asked, head, tile):
        """Load a tile's numbers."""
        for i, to in enumerate(asked):
            self.tokens.ask(to, g.u, g.pre, self.place(head, tile, i), i % self.spec.tiles)

    def place(self, head, tile, i):
        """Of the i-th that a tile has: of two blocks the one whose turn it is; of the mirrored filter the last is
        first."""
        turn, blocks = i // self.spec.tiles, self.spec.blocks
        block = blocks - 1 - turn if self.spec.conjugate else turn
        return Place(head, tile * self.spec.sequences, Int32(block * ROWS * COLS))

    @cute.jit
    def head(self, g: Given, s: Shared, asked, w: Work):
        """The tiles of a part of a head's sequences."""
        scale = self.tables.fill_spectra_at_once(s.spectra, of_head(g.spectrum, w.head), s.largest)
        tiles, step = cute.ceil_div(g.u.shape[0], self.spec.sequences), self.config.warpgroups * g.splits
        if w.first >= tiles:
            self.ask(g, asked, w.next_head, w.next_first)
        for tile in cutlass.range(w.first, tiles, step, unroll=1):
            self.tile(g, s, asked, w, (tile, scale, tile + step, tiles))

    @cute.jit
    def tile(self, g: Given, s: Shared, asked, w: Work, turn):
        """turn: (tile, what results are multiplied by, the tile after that, the part's end)"""
        spec, barrier = self.spec, 1 + w.wg
        most = cute.make_rmem_tensor((2, spec.tiles), Int32)
        self.tokens.note(most, asked, s.of_warps)
        if const_expr(spec.rows > 16):
            tk.sync(barrier, tk.WARPGROUP)
        self.tokens.largest(most, s.of_warps)
        for block in cutlass.range_constexpr(spec.blocks):
            self.block(g, s, (asked, most), w, (*turn, block))

    @cute.jit
    def block(self, g: Given, s: Shared, held, w: Work, turn):
        """A tile of a block. held: (what was asked for, largest magnitudes). turn: as of `tile`, and the block whose
        turn it is."""
        (asked, most), (tile, scale, following, end, turns) = held, turn
        spec, barrier, acc, narrow = self.spec, 1 + w.wg, tk.pair(COLS), tk.pair(COLS, Float16)
        first = (spec.tiles + 2) * w.wg
        between, inputs = [s.tiles[first + i] for i in range(2)], [s.tiles[first + 2 + i] for i in range(spec.tiles)]
        for i in cutlass.range_constexpr(spec.tiles):
            to = narrow.imag if const_expr(i) else narrow.real
            self.tokens.divided(to, asked[spec.tiles * turns + i], most, i)
        self.transform.put(inputs, narrow)
        self.transform.written()
        self.transform.meet(barrier)
        self.transform.forth(acc, narrow, inputs, s.factors)
        for part in cutlass.range_constexpr(2):
            tk.mma_wait(1)  # of the latest product: that of the other half
            self.multiply(narrow, acc, s, turns, part)
            self.transform.half_back(acc, narrow, s.factors, part)
        tk.mma_wait()
        self.transform.back(acc, narrow, between, s.factors)
        if const_expr(turns == spec.blocks - 1):
            last = following >= end
            self.ask(g, asked, cutlass.select_(last, w.next_head, w.head),
                     cutlass.select_(last, w.next_first, following))
        self.transform.meet(barrier)
        self.transform.left_back(acc, between, s.factors)
        outer = row_scale(spec.rows) ** 2 * COLUMN_SCALE ** 2 * spec.points
        place = self.place(w.head, tile, spec.tiles * turns)
        for i in cutlass.range_constexpr(spec.tiles):
            result = acc.imag if const_expr(i) else acc.real
            self.tokens.store(g.y, g.post, result, most, scale * Float32(1.0 / outer), place, i)

    def multiply(self, narrow: tk.Pair, acc: tk.Pair, s: Shared, turns, part):
        """A half of a block's spectrum times the filter's; of two blocks the first one's is kept for the second."""
        of = lambda n: s.spectra[None, None, None, n]
        if self.spec.blocks > 1 and turns == 0:
            woven.woven_mul(narrow, acc, of(0), part, keep=s.before)
        elif self.spec.blocks > 1:
            woven.woven_mul(narrow, acc, of(0), part, more=(s.before, of(1)))
        else:
            woven.woven_mul(narrow, acc, of(0), part)
