"""y = post * (the convolution of pre * u with a filter per head), up to 4096 points, with split operands; and the
arguments that `InRegisters` and `BlockedFftConv` share. Which kernel a spec gets: `launch.recipe`."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.operands import Operands
from tkq.convolution.fft.sequences import Place, Sequences
from tkq.convolution.fft.spec import COLS, COLUMN_SCALE, ROWS, SHARED_BLOCKS, row_scale
from tkq.convolution.fft.tables import Tables, of_head
from tkq.convolution.fft.transform import TILE, Factors, Transform
from tkq.runtime.compile import fake


class Given(NamedTuple):
    """u (B, H, L), spectrum (H, blocks, points, 2) fp32, gates and y as u; parts in which a head's tiles go to
    blocks; of many blocks of tokens a workspace (launched blocks, warpgroups, kept spectra, 16, 128, 4) fp16."""

    u: cute.Tensor
    spectrum: cute.Tensor
    pre: Optional[cute.Tensor]
    post: Optional[cute.Tensor]
    y: cute.Tensor
    splits: Int32
    workspace: Optional[cute.Tensor] = None


class Shared(NamedTuple):
    """A block's: factors, the head's spectrum, ints for its largest part. A warpgroup's: two tiles, magnitudes, and
    its place: addresses that follow from a number in shared memory take no registers before it is read."""

    factors: Factors
    spectrum: cute.Tensor
    largest: cute.Tensor
    tiles: tk.SharedTile
    of_rows: cute.Tensor
    of_sequences: cute.Tensor
    place: cute.Tensor


class FftConv:
    """A block has a head after the other, each warpgroup a tile of its sequences after the other. Of a circular
    convolution two sequences are a complex one, whose parts a real filter keeps apart.

        u  -> shared   F X      accumulators, times twiddles, rounded: the A operand of
                       A F      times the filter's spectrum, conjugated, rounded: the A operand of
                       Z F      times twiddles, conjugated, rounded -> shared
                       F' B     -> y

    F is a matrix of roots of unity in fp16, products accumulate in fp32. Split, each operand is the sum of two fp16
    ones and each product three. Each sequence is divided by a power of 2 near its largest number before, and the
    filter's spectrum likewise: no product overflows. That spectrum itself is float32: a filter whose magnitudes add up
    to more than that has gives NaN.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.tables, self.transform = Tables(spec, config.threads), Transform(spec)
        self.sequences = Sequences(spec, tk.element_type(spec.dtype))

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        spec, operands = self.spec, Operands(self.spec)
        spectrum = fake.tensor("fp32", (operands.H, spec.blocks, spec.points, 2), align=8)
        workspace = None
        if spec.blocks > SHARED_BLOCKS:
            workspace = fake.tensor("fp16", (fake.sym(), self.config.warpgroups, spec.kept, 16, tk.WARPGROUP, 4))
        return operands.one(), (spectrum, *operands.gates(), operands.one(), Int32(0), workspace), Int32(0)

    @cute.jit
    def __call__(self, u: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind u."""
        self.kernel(Given(u, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        spec, al, n = self.spec, tk.SharedAllocator(), self.config.warpgroups
        rows, columns = self.transform.factors(al)
        tiles = al.tile(TILE, 2 * self.transform.parts * n)
        spectrum = al.allocate_tensor(Float32, tk.factors(tk.WARPGROUP, COLS, 1), 16)
        twiddles = al.allocate_tensor(Float32, tk.powers(tk.WARPGROUP), 16)
        largest = al.allocate_tensor(Int32, cute.make_layout(4 * n), 16)
        of_rows, of_sequences = (al.allocate_tensor(Int32, cute.make_layout((spec.tiles * ROWS, n)), 16)
                                 for _ in range(2))
        places = al.allocate_tensor(Int32, cute.make_layout((2, n)), 16)
        factors = Factors(rows, columns, twiddles)
        wg = tk.warpgroup_id()
        me = cute.arch.thread_idx()[0]
        self.tables.fill_rows(rows, me)
        self.tables.fill_columns(factors.columns, me)
        self.tables.fill_twiddles(twiddles)
        tk.publish()
        s = Shared(factors, spectrum, largest, tiles, of_rows[None, wg], of_sequences[None, wg],
                   places[None, wg])
        heads = g.u.shape[1] * g.splits
        for item in cutlass.range(cute.arch.block_idx()[0], heads, cute.arch.grid_dim()[0], unroll=1):
            self.head(g, s, item // g.splits, item % g.splits, wg)

    @cute.jit
    def head(self, g: Given, s: Shared, head, part, wg):
        """The tiles of a part of a head's sequences."""
        tk.sync_block()
        scale = self.tables.fill_spectra(s.spectrum, of_head(g.spectrum, head), s.largest)
        tk.sync_block()
        each, n = self.spec.sequences, self.config.warpgroups
        for tile in cutlass.range(part * n + wg, cute.ceil_div(g.u.shape[0], each), n * g.splits, unroll=1):
            self.tile(g, s, Place(head, tile * each, Int32(0)), scale, wg)

    @cute.jit
    def tile(self, g: Given, s: Shared, place: Place, scale, wg):
        spec, barrier = self.spec, 1 + wg
        values = [cute.make_rmem_tensor((8, 4), Float32) for _ in range(spec.tiles)]
        for i in cutlass.range_constexpr(spec.tiles):
            self.sequences.load(values[i], g.u, g.pre, place, i)
        for i in cutlass.range_constexpr(spec.tiles):
            self.sequences.largest_of_tile(values[i], s.of_rows, i)
        tk.sync(barrier, tk.WARPGROUP)  # all have done with the tile before, too
        if tk.thread_in_warpgroup() == 0:
            s.place[0], s.place[1] = place.head, place.batch
        self.sequences.largest_of_sequences(s.of_rows, s.of_sequences)
        tk.sync(barrier, tk.WARPGROUP)
        parts = 2 * self.transform.parts
        tiles = [s.tiles[parts * wg + i] for i in range(parts)]
        for i in cutlass.range_constexpr(spec.tiles):
            self.sequences.put(tiles, values[i], s.of_sequences, i)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        acc, narrow = tk.pair(COLS), self.transform.narrow()
        self.transform.forth(acc, narrow, tiles, s.factors)
        tk.complex_mul_narrow(narrow, acc, s.spectrum[None, None, None, 0], conjugate=True)
        self.transform.back(acc, narrow, tiles, s.factors, barrier)
        place = Place(s.place[0], s.place[1], Int32(0))
        outer = row_scale(spec.rows) ** 2 * COLUMN_SCALE ** 2 * spec.points
        for i in cutlass.range_constexpr(spec.tiles):
            result = acc.imag if const_expr(i) else acc.real
            self.sequences.store(g.y, g.post, result, s.of_sequences, scale * Float32(1.0 / outer), place, i)
