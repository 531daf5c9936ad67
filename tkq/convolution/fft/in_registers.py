"""y = post * (the convolution of pre * u with a filter per head), of one block of tokens or, in bf16, of two, all of
which a warpgroup has in registers before; operands of products are fp16."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.convolution.fft.halves import Halves
from tkq.convolution.fft.kernel import FftConv
from tkq.convolution.fft.ring import SpectraRing
from tkq.convolution.fft.sequences import Place
from tkq.convolution.fft.spec import COLS, COLUMN_SCALE, ROWS, row_scale
from tkq.convolution.fft.tables import Tables
from tkq.convolution.fft.tokens import Tokens
from tkq.convolution.fft.transform import TILE, Factors
from tkq.runtime.compile import fake
from tkq.tile import woven


class Given(NamedTuple):
    """u (B, H, L), spectra (H, `FftSpec.head_words`) int32, gates and y as u."""

    u: cute.Tensor
    spectra: cute.Tensor
    pre: Optional[cute.Tensor]
    post: Optional[cute.Tensor]
    y: cute.Tensor


class Shared(NamedTuple):
    """A block's factors. A warpgroup's: two tiles in between and those of the input, magnitudes of its warps, of two
    blocks the first one's spectrum."""

    factors: Factors
    tiles: tk.SharedTile
    of_warps: cute.Tensor
    before: Optional[cute.Tensor]


class Work(NamedTuple):
    """A warpgroup's number, the head and the tile that it is at, those that follow if there are more."""

    wg: Int32
    head: Int32
    tile: Int32
    next_head: Int32
    next_tile: Int32
    more: Boolean


class InRegisters:
    """Tiles of all heads are in a row, of which each block has a part, as many as others or one more; its warpgroups
    take them by turns, and heads' spectra wait in a ring (`SpectraRing`). Of a circular convolution two sequences are a
    complex one, whose parts a real filter keeps apart.

        u  -> shared   F X      accumulators, times twiddles, sums and differences, rounded: the A operands of
                       A F, D G, times the filter's spectrum, rounded: the A operands of
                       Z F', Y G', sums and differences, times twiddles, conjugated, rounded -> shared
                       F' B     -> y

    F and G are matrices of roots of unity in fp16, products accumulate in fp32. Each sequence is divided by a power of
    2 near its largest number before, and the filter's spectrum likewise: no product overflows. That spectrum itself is
    made in float32: a filter whose magnitudes add up to more than that has gives NaN.
    A tile's numbers are loaded while the last product of the tile before runs. Two blocks are as in `BlockedFftConv`.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.tables, self.transform = Tables(spec, config.threads, halves=True), Halves(spec)
        self.tokens = Tokens(spec, tk.element_type(spec.dtype))

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        u, (_, pre, post, y, *_), blocks = FftConv(self.spec, self.config).fake_arguments()
        spectra = fake.tensor("int32", (fake.sym(), self.spec.head_words), (fake.sym64(4), 1))
        return u, (spectra, pre, post, y), blocks

    @cute.jit
    def __call__(self, u: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind u."""
        self.kernel(Given(u, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1, use_pdl=True)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        al, n, wg, before = tk.SharedAllocator(), self.config.warpgroups, tk.warpgroup_id(), None
        factors, ring = self.transform.factors(al), SpectraRing(self.spec, self.config)
        tiles = al.tile(TILE, (self.spec.tiles + 2) * n)
        of_warps = al.allocate_tensor(Int32, cute.make_layout((4, self.spec.tiles, n)), 16)
        ring.allocate(al)
        if const_expr(self.spec.blocks > 1):
            before = self.transform.spectra(al, n)[None, None, None, wg]
        tk.init_block(ring.initialise)
        first, end = self.part(g)
        per_head = cute.ceil_div(g.u.shape[0], self.spec.sequences)
        head, tile = Int32(first // per_head), Int32(first % per_head)
        heads = head, Int32((end - 1) // per_head)
        asked = [self.tokens.asked(g.pre) for _ in range(self.spec.tiles * self.spec.blocks)]
        head, tile = self.after(head, tile + wg, per_head)
        count = Int32(end - first)
        self.ask(g, asked, (head, tile, wg < count))
        self.transform.fill(factors, self.tables, cute.arch.thread_idx()[0])
        tk.publish()
        if tk.warp_id() == 0:  # the spectra alone are the kernel's before, and warp 0 reads them
            cute.arch.griddepcontrol_wait()
        ring.begin(g.spectra, *heads)
        tk.sync_block()
        s = Shared(factors, tiles, of_warps[None, None, wg], before)
        for i in cutlass.range(wg, count, n, unroll=1):
            w = Work(wg, head, tile, *self.after(head, tile + n, per_head), i + n < count)
            self.tile(g, s, ring, asked, w)
            head, tile = w.next_head, w.next_tile
        ring.leave()

    def part(self, g: Given):
        """The first of a block's tiles, and the first behind them."""
        tiles = Int64(cute.ceil_div(g.u.shape[0], self.spec.sequences)) * g.u.shape[1]
        block, blocks = Int64(cute.arch.block_idx()[0]), cute.arch.grid_dim()[0]
        return block * tiles // blocks, (block + 1) * tiles // blocks

    def after(self, head, tile, per_head):
        """Head and tile, what is behind a head's last one counted as the next head's. A head has as many tiles as a
        block has warpgroups, at least."""
        there = tile < per_head
        return cutlass.select_(there, head, head + 1), cutlass.select_(there, tile, tile - per_head)

    def ask(self, g: Given, asked, which):
        """Load a tile's numbers, if there is one. which: (head, tile, is it there?)"""
        head, tile, there = which
        head, tile = cutlass.select_(there, head, 0), cutlass.select_(there, tile, g.u.shape[0])
        for i, to in enumerate(asked):
            self.tokens.ask(to, g.u, g.pre, self.place(head, tile, i), i % self.spec.tiles)

    def place(self, head, tile, i):
        """Of the i-th that a tile has: of two blocks the one whose turn it is; of the mirrored filter the last is
        first."""
        turn, blocks = i // self.spec.tiles, self.spec.blocks
        block = blocks - 1 - turn if self.spec.conjugate else turn
        return Place(head, tile * self.spec.sequences, Int32(block * ROWS * COLS))

    @cute.jit
    def tile(self, g: Given, s: Shared, ring, asked, w: Work):
        spec, barrier = self.spec, 1 + w.wg
        most = cute.make_rmem_tensor((2, spec.tiles), Int32)
        self.tokens.note(most, asked, s.of_warps)
        if const_expr(spec.rows > 16):
            tk.sync(barrier, tk.WARPGROUP)
        self.tokens.largest(most, s.of_warps)
        ring.enter(w.head)
        for block in cutlass.range_constexpr(spec.blocks):
            self.block(g, s, ring, (asked, most), (w, block))

    @cute.jit
    def block(self, g: Given, s: Shared, ring, held, turn):
        """A tile of a block. held: (what was asked for, largest magnitudes). turn: (`Work`, the block whose turn it
        is)."""
        (asked, most), (w, turns) = held, turn
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
            self.multiply(narrow, acc, ring, (s.before, turns, part))
            self.transform.half_back(acc, narrow, s.factors, part)
        tk.mma_wait()
        self.transform.back(acc, narrow, between, s.factors)
        if const_expr(turns == spec.blocks - 1):
            self.ask(g, asked, (w.next_head, w.next_tile, w.more))
        self.transform.meet(barrier)
        self.transform.left_back(acc, between, s.factors)
        outer = row_scale(spec.rows) ** 2 * COLUMN_SCALE ** 2 * spec.points
        place = self.place(w.head, w.tile, spec.tiles * turns)
        for i in cutlass.range_constexpr(spec.tiles):
            result = acc.imag if const_expr(i) else acc.real
            self.tokens.store(g.y, g.post, result, most, ring.scale() * Float32(1.0 / outer), place, i)

    def multiply(self, narrow: tk.Pair, acc: tk.Pair, ring, which):
        """A half of a block's spectrum times the filter's; of two blocks the first one's is kept for the second. which:
        (where, the block whose turn it is, the half)"""
        before, turns, part = which
        if self.spec.blocks > 1 and turns == 0:
            woven.woven_mul(narrow, acc, ring.table(0), part, keep=before)
        elif self.spec.blocks > 1:
            woven.woven_mul(narrow, acc, ring.table(0), part, more=(before, ring.table(1)))
        else:
            woven.woven_mul(narrow, acc, ring.table(0), part)
