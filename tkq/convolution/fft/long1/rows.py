"""Rows transformed, multiplied, transformed back: the pass in the middle of a convolution of many points."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.long1.spec import IN_TILE, PART
from tkq.convolution.fft.long1.steps import EACH, exponent_of, largest_of, largest_of_warpgroup, parts_of, place
from tkq.convolution.fft.sequences import put_eight
from tkq.convolution.fft.spec import COLS, ROWS, FftSpec
from tkq.convolution.fft.tables import INFINITE, Tables, magnitude, power, power_of
from tkq.convolution.fft.transform import TILE, Factors, Transform
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.transfer import _transposed

POINTS = ROWS * COLS


class Given(NamedTuple):
    """x (H, B, 2, N) fp16 and largest (H, B, parts), as `Columns` leaves them, and those of the filter (B = 1) or of
    the result's gradient; exponents (H, N / 4096) of what is multiplied by the filter or summed; above: as in `Size`;
    conjugate: 1 or -1, which the imaginary part of the filter's spectrum is multiplied by."""

    x: cute.Tensor
    largest: cute.Tensor
    other: cute.Tensor
    other_largest: cute.Tensor
    exponents: cute.Tensor
    above: Int32
    conjugate: Int32


class Shared(NamedTuple):
    """A block's factors. A warpgroup's: two tiles, the filter's spectrum, four ints, one for each operand, and its
    place: addresses that follow from a number in shared memory take no registers before it is read."""

    factors: Factors
    tiles: tk.SharedTile
    table: Optional[cute.Tensor]
    largest: cute.Tensor
    exponents: cute.Tensor
    place: cute.Tensor


class Rows:
    """x = the inverse transform of (x's transform times the filter's), of each row; in place.

    A tile is 4096 points of a head: rows of the matrix, as many as there is room for. A warpgroup has a tile after the
    other, the filter's first, whose spectrum it divides by a power of 2 near its largest number (the exponent goes to
    the next pass), then those of the sequences. Warpgroups share factors alone: none waits for another.
    """

    gradient = False

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.fft = FftSpec("bf16", spec.rows, causal=False)
        self.tables, self.transform = Tables(self.fft, config.threads), Transform(self.fft)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        H, B, tiles = fake.sym(), fake.sym(), fake.sym()

        def operand(batch):
            return fake.tensor("fp16", (H, batch, 2, fake.sym(divisibility=POINTS))), fake.tensor(
                "int32", (H, batch, fake.sym()), align=4)

        x, largest = operand(B)
        exponents = fake.tensor("int32", (H, tiles), align=4)
        return x, (largest, *operand(fake.sym()), exponents, Int32(0), Int32(0)), Int32(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind x."""
        self.kernel(Given(x, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        al, n = tk.SharedAllocator(), self.config.warpgroups
        rows, columns, tiles = al.tile(TILE, 4), al.tile(TILE, 3), al.tile(TILE, 2 * n)
        twiddles = al.allocate_tensor(Float32, tk.powers(tk.WARPGROUP), 16)
        largest, ints = (al.allocate_tensor(Int32, cute.make_layout((4, n)), 16) for _ in range(2))
        exponents = cute.make_tensor(ints[None, tk.warpgroup_id()].iterator, cute.make_layout((2, 1)))
        place = cute.make_tensor(exponents.iterator + 2, cute.make_layout(2))
        wg, me, table = tk.warpgroup_id(), cute.arch.thread_idx()[0], None
        if const_expr(not self.gradient):
            table = al.allocate_tensor(Float32, tk.factors(tk.WARPGROUP, COLS, n), 16)[None, None, None, wg]
        factors = Factors(rows, tk.SharedPair(columns[0], columns[1], columns[2]), twiddles)
        self.tables.fill_rows(rows, me)
        self.tables.fill_columns(factors.columns, me)
        self.tables.fill_twiddles(twiddles)
        tk.publish()
        tk.sync_block()
        s = Shared(factors, tiles, table, largest[None, wg], exponents, place)
        across = g.x.shape[3] // POINTS
        for item in cutlass.range(cute.arch.block_idx()[0] * n + wg, g.x.shape[0] * across,
                                  cute.arch.grid_dim()[0] * n, unroll=1):
            self.head(g, s, item // across, item % across, wg)

    @cute.jit
    def head(self, g: Given, s: Shared, head, tile, wg):
        """A tile of a head's sequences."""
        acc, narrow, barrier = tk.pair(COLS), tk.pair(COLS, Float16), 1 + wg
        tiles, how = [s.tiles[2 * wg + i] for i in range(2)], (g.above, barrier, s.exponents[0, None])
        self.load(tiles, g.other, g.other_largest, (head, Int32(0), tile), how)
        self.transform.forth(acc, narrow, tiles, s.factors)
        exponent = self.normalize(acc, s.largest, barrier, Float32(g.conjugate))
        tk.complex_to_table(s.table, acc)
        if tk.thread_in_warpgroup() == 0:
            g.exponents[head, tile] = exponent
        for batch in cutlass.range(g.x.shape[1], unroll=1):
            self.load(tiles, g.x, g.largest, (head, batch, tile), how)
            self.transform.forth(acc, narrow, tiles, s.factors)
            tk.complex_mul_narrow(narrow, acc, s.table, conjugate=True)
            self.transform.back(acc, narrow, tiles, s.factors, barrier)
            self.store(g.x, acc, (head, batch, tile))

    @cute.jit
    def load(self, tiles, x: cute.Tensor, largest: cute.Tensor, at, how):
        """The real and the imaginary tile in shared memory, all columns' divided by the same power of 2, near the
        largest number of the sequence. at: (head, batch index, tile). how: (above, barrier, an int in shared memory for
        the exponent of that number, as a magnitude has it: 255 of NaN and infinities)."""
        (head, batch, tile), (above, barrier, exponent) = at, how
        values = cute.make_rmem_tensor((EACH, parts_of(COLS), 2), Float16)
        for of in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(parts_of(COLS)):
                row, col = place(i, COLS)
                there = vectors.run_at(x, (head, batch, of, tile * POINTS + row * COLS + col), EACH)
                cute.autovec_copy(there, values[None, i, of])
        notes = largest[head, batch, None]
        most = largest_of(notes)
        tk.sync(barrier, tk.WARPGROUP)  # all have done with what was in the tiles
        for i in cutlass.range_constexpr(parts_of(COLS)):
            row, col = place(i, COLS)
            mine = notes[(row % self.spec.rows * COLS + col) // PART]
            by = power_of(exponent_of(mine) - exponent_of(most) + above - IN_TILE)
            for of in cutlass.range_constexpr(2):
                put_eight(tiles[of], [Float32(values[e, i, of]) * by for e in range(EACH)], row, col)
        if tk.thread_in_warpgroup() == 0:
            exponent[0] = Int32(cutlass.select_(most < INFINITE, exponent_of(most), 255))
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)

    @cute.jit
    def normalize(self, acc: tk.Pair, largest: cute.Tensor, barrier, conjugate):
        """acc divided by a power of 2 near its largest number, whose exponent is returned; the imaginary part times
        `conjugate`."""
        most = Int32(0)
        for i in cutlass.range_constexpr(COLS // 2):
            most = cutlass.max(most, cutlass.max(magnitude(acc.real.tensor[i]), magnitude(acc.imag.tensor[i])))
        most = largest_of_warpgroup(most, largest, barrier)
        down, up = power(most, 0)
        for i in cutlass.range_constexpr(COLS // 2):
            acc.real.tensor[i] = acc.real.tensor[i] * down
            acc.imag.tensor[i] = acc.imag.tensor[i] * (down * conjugate)
        return up.bitcast(Int32) >> 23

    def store(self, x: cute.Tensor, acc: tk.Pair, at):
        """The result's tile in memory, rounded."""
        (head, batch, tile), lane = at, tk.lane_id() % 4
        for of, result in enumerate((acc.real, acc.imag)):
            view = result.rows_view
            for r in range(2):
                for part in range(COLS // 32):
                    words = []
                    for j in range(4):
                        two = [view[r, 2 * (4 * part + j) + e] for e in range(2)]
                        words.append(cute.recast_tensor(vectors.packed(two, Float16), Int32)[0])
                    four = _transposed(words, lane)
                    point = tile * POINTS + (tk.first_row() + 8 * r) * COLS + 32 * part + EACH * lane
                    there = vectors.run_at(x, (head, batch, of, point), EACH).iterator.align(16)
                    cute.autovec_copy(four, cute.make_tensor(cute.recast_ptr(there, dtype=Int32), cute.make_layout(4)))


class RowsGradient(Rows):
    """x's first sequence = the inverse transform of the sum over sequences of conj(X) Y, X and Y the transforms of x
    and of the other, as the rows' part of a filter's gradient.

    As in `Rows`, but that products are added up in registers, in the sequences' order: the same bits in every run. Each
    product gets back what both were divided by; the sum is divided by a power of 2 near its largest number.
    """

    gradient = True

    @cute.jit
    def head(self, g: Given, s: Shared, head, tile, wg):
        acc, narrow, barrier = tk.pair(COLS), tk.pair(COLS, Float16), 1 + wg
        spectrum, total = tk.pair(COLS, Float16), tk.pair(COLS)
        tiles = [s.tiles[2 * wg + i] for i in range(2)]
        tk.sync(barrier, tk.WARPGROUP)  # all have done with the place before
        if tk.thread_in_warpgroup() == 0:
            s.place[0], s.place[1] = head, tile
        tk.sync(barrier, tk.WARPGROUP)
        tk.zero(total.real)
        tk.zero(total.imag)
        for batch in cutlass.range(g.x.shape[1], unroll=1):
            at = s.place[0], batch, s.place[1]
            self.load(tiles, g.x, g.largest, at, (g.above, barrier, s.exponents[0, None]))
            self.transform.forth(acc, narrow, tiles, s.factors)
            tk.complex_copy(spectrum, acc)
            self.load(tiles, g.other, g.other_largest, at, (g.above, barrier, s.exponents[1, None]))
            self.transform.forth(acc, narrow, tiles, s.factors)
            tk.complex_fma_conj(total, spectrum, acc, self.both(g, s))
        exponent = self.normalize(total, s.largest, barrier, Float32(1.0))
        if tk.thread_in_warpgroup() == 0:
            g.exponents[s.place[0], s.place[1]] = exponent
        tk.complex_copy(narrow, total, conjugate=True)
        self.transform.back(acc, narrow, tiles, s.factors, barrier)
        self.store(g.x, acc, (s.place[0], Int32(0), s.place[1]))

    @cute.jit
    def both(self, g: Given, s: Shared):
        """What a product of two spectra is multiplied by, in each row: what both were divided by."""
        first, second, by = s.exponents[0, 0], s.exponents[1, 0], tk.rv()
        up = power_of(first + second - 2 * (127 + g.above))
        for r in cutlass.range_constexpr(2):
            by.tensor[r] = cutlass.select_(cutlass.max(first, second) < 255, up, Float32.inf - Float32.inf)
        return by
