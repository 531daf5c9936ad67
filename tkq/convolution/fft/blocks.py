"""y = post * (the causal convolution of pre * u with a filter per head), of several blocks of 4096 tokens."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.kernel import FftConv, Given
from tkq.convolution.fft.sequences import STEPS, Place
from tkq.convolution.fft.spec import COLS, COLUMN_SCALE, ROWS, SHARED_BLOCKS, row_scale
from tkq.convolution.fft.tables import of_head
from tkq.convolution.fft.transform import TILE, Factors


class Shared(NamedTuple):
    """A block's: factors, the spectra of the filter's parts, ints for their largest number. A warpgroup's: two tiles,
    magnitudes, spectra of its sequences' blocks."""

    factors: Factors
    filters: cute.Tensor
    largest: cute.Tensor
    tiles: tk.SharedTile
    of_rows: cute.Tensor
    of_sequences: cute.Tensor
    before: Optional[cute.Tensor]


class BlockedFftConv:
    """As `FftConv`, of 64 rows and causal, for sequences of up to `blocks` blocks, each with a transform of its own:

        block j of y  is the sum over i to j of  block i of v  convolved with  the filter's part j - i

    where part m has the taps around 4096 m, 4095 to either side: of a transform of 4096 points at frequencies k - 1/4
    those before are the negative imaginary part. The sums are of spectra: a block is transformed once, back once.
    Spectra of blocks before are rounded to fp16, as they are for products; the first one's stay in registers, others in
    shared memory, or in a workspace where they are many, each thread's for itself. A sequence has one scale, of all its
    blocks. Of the mirrored filter the last block comes first.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.one = FftConv(spec, config)
        self.tables, self.transform, self.parts = self.one.tables, self.one.transform, self.one.sequences

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        return self.one.fake_arguments()

    @cute.jit
    def __call__(self, u: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind u."""
        self.kernel(Given(u, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        spec, al, n = self.spec, tk.SharedAllocator(), self.config.warpgroups
        rows, columns, tiles = al.tile(TILE, 2), al.tile(TILE, 3), al.tile(TILE, 2 * n)
        filters = al.allocate_tensor(Float16, tk.factors(tk.WARPGROUP, COLS, spec.blocks), 16)
        before, wg = None, tk.warpgroup_id()
        if const_expr(spec.blocks > SHARED_BLOCKS):
            before = g.workspace[cute.arch.block_idx()[0], wg, None, None, None, None]
            before = cute.make_tensor(before.iterator, tk.factors(tk.WARPGROUP, COLS, spec.kept))
        elif const_expr(spec.kept):
            before = al.allocate_tensor(Float16, tk.factors(tk.WARPGROUP, COLS, spec.kept, n), 16)
            before = before[None, None, None, None, wg]
        twiddles = al.allocate_tensor(Float32, tk.powers(tk.WARPGROUP), 16)
        largest = al.allocate_tensor(Int32, cute.make_layout(4 * n), 16)
        of_rows, of_sequences = (al.allocate_tensor(Int32, cute.make_layout((ROWS, n)), 16) for _ in range(2))
        factors = Factors(rows, tk.SharedPair(columns[0], columns[1], columns[2]), twiddles)
        me = cute.arch.thread_idx()[0]
        self.tables.fill_rows(rows, me)
        self.tables.fill_columns(factors.columns, me)
        self.tables.fill_twiddles(twiddles)
        tk.publish()
        s = Shared(factors, filters, largest, tiles, of_rows[None, wg], of_sequences[None, wg], before)
        for item in cutlass.range(cute.arch.block_idx()[0], g.u.shape[1] * g.splits, cute.arch.grid_dim()[0],
                                  unroll=1):
            head, part = item // g.splits, item % g.splits
            tk.sync_block()
            scale = self.tables.fill_spectra(filters, of_head(g.spectrum, head), largest)
            tk.sync_block()
            for batch in cutlass.range(part * n + wg, g.u.shape[0], n * g.splits, unroll=1):
                self.sequence(g, s, Place(head, batch, Int32(0)), scale, wg)

    @cute.jit
    def sequence(self, g: Given, s: Shared, place: Place, scale, wg):
        """All blocks of a sequence."""
        blocks, barrier = cute.ceil_div(g.u.shape[2], ROWS * COLS), 1 + wg
        most, values = cute.make_rmem_tensor((STEPS,), Int32), cute.make_rmem_tensor((8, STEPS), Float32)
        most.fill(0)
        for j in cutlass.range(blocks, unroll=1):
            self.parts.load(values, g.u, g.pre, self.at(place, j, blocks), 0)
            self.parts.note_largest(most, values)
        self.parts.largest_of_rows(most, s.of_rows, 0)
        tk.sync(barrier, tk.WARPGROUP)
        self.parts.largest_of_sequences(s.of_rows, s.of_sequences)
        first = tk.pair(COLS, Float16)
        for j in cutlass.range(blocks, unroll=1):
            self.block(g, s, self.at(place, j, blocks), (j, blocks, first, scale), wg)

    def at(self, place, j, blocks):
        """Of the block that is the j-th in turn."""
        block = blocks - 1 - j if self.spec.conjugate else j
        return place._replace(token=block * (ROWS * COLS))

    @cute.jit
    def block(self, g: Given, s: Shared, place: Place, turn, wg):
        """turn: (the block's number, blocks in all, the first block's spectrum, what results are multiplied by)."""
        (j, blocks, first, scale), barrier = turn, 1 + wg
        values, tiles = cute.make_rmem_tensor((8, STEPS), Float32), [s.tiles[2 * wg + i] for i in range(2)]
        self.parts.load(values, g.u, g.pre, place, 0)
        tk.sync(barrier, tk.WARPGROUP)  # all have done with the tiles; the sequences' largest numbers are there
        self.parts.put(tiles, values, s.of_sequences, 0)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        acc, narrow = tk.pair(COLS), tk.pair(COLS, Float16)
        self.transform.forth(acc, narrow, tiles, s.factors)
        self.multiply(s, acc, first, j, blocks)
        tk.complex_copy(narrow, acc, conjugate=True)
        self.transform.back(acc, narrow, tiles, s.factors, barrier)
        outer = row_scale(ROWS) ** 2 * COLUMN_SCALE ** 2 * self.spec.points
        self.parts.store(g.y, g.post, acc.real, s.of_sequences, scale * Float32(1.0 / outer), place, 0)

    @cute.jit
    def multiply(self, s: Shared, acc: tk.Pair, first: tk.Pair, j, blocks):
        """acc = the sum over blocks to the j-th, whose spectrum it is. What later blocks need of it stays."""
        part = lambda m: s.filters[None, None, None, m]
        if j == 0:
            tk.complex_copy(first, acc)
        if const_expr(self.spec.kept):
            if j > 0 and j < blocks - 1:
                tk.complex_to_table(s.before[None, None, None, j - 1], acc)
        tk.complex_mul_table(acc, acc, part(0))
        if j > 0:
            tk.complex_mul_table(acc, first, part(j), True)
        if const_expr(self.spec.kept):
            for i in cutlass.range(1, j, unroll=1):
                tk.complex_mul_table(acc, s.before[None, None, None, i - 1], part(j - i), True)
