"""Rows transformed, multiplied, transformed back: the pass in the middle of a convolution of many points."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.long.spec import planes_of
from tkq.convolution.fft.long.steps import exponent_of, largest_of, largest_of_warpgroup
from tkq.convolution.fft.spec import COLS, ROWS, FftSpec
from tkq.convolution.fft.tables import EXPONENT, INFINITE, Tables, magnitude, power, power_of_two
from tkq.convolution.fft.transform import TILE, Factors, Transform
from tkq.runtime.compile import fake

POINTS = ROWS * COLS
STAGES = 2
# A gradient's sum, split, is brought below 2^6. Of an impulse all frequencies are as large: transformed back, 4096 of
# them are one number of 2^12.5, and sums of as many rows as the radix has, scaled, 4 of these: still an fp16.
ABOVE = 5


class Given(NamedTuple):
    """x, as `Columns` leaves it, in tiles of 64 x 64, and the filter's, or that of the result's gradient; where x's
    results go; notes of the largest numbers, of a gradient alone; exponents (H, N / 4096) of what is multiplied by the
    filter or summed; sequences of a head; above: as in `Size`; conjugate: 1 or -1, which the imaginary part of the
    filter's spectrum is multiplied by."""

    x: tk.gl
    other: tk.gl
    to: tk.gl
    largest: Optional[cute.Tensor]
    other_largest: Optional[cute.Tensor]
    exponents: cute.Tensor
    batch: Int32
    above: Int32
    conjugate: Int32


class Shared(NamedTuple):
    """A block's factors. A warpgroup's: two stages of two tiles (split, four), their semaphores, a spectrum, four ints,
    and its number: addresses that follow from one in shared memory take no registers before it is read."""

    factors: Factors
    tiles: tk.SharedTile
    full: tk.Semaphore
    table: Optional[cute.Tensor]
    largest: cute.Tensor
    number: cute.Tensor


class Work(NamedTuple):
    """Of a warpgroup: its number, its first tile of all heads' and the step to the next one, how many it has, operands
    of each; tiles of a head are 2^shift."""

    wg: Int32
    first: Int32
    step: Int32
    tiles: Int32
    each: Int32
    shift: Int32

    def place(self, i):
        """(head, tile of the head) of the i-th."""
        of = self.first + i * self.step
        return of >> self.shift, of & ((1 << self.shift) - 1)


class Rows:
    """x = the inverse transform of (x's transform times the filter's), of each row; in place.

    A tile is 4096 points of a head: rows of the matrix, as many as there is room for. A warpgroup has a tile after the
    other, the filter's first, whose spectrum it divides by a power of 2 near its largest number (the exponent goes to
    the next pass), then those of the sequences. Its first warp loads the next operand, by TMA, while the present one
    is transformed. Warpgroups share factors alone: none waits for another.
    """

    gradient = False

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.fft, self.planes = FftSpec("bf16", spec.rows, causal=False, split=spec.split), planes_of(spec.split)
        self.tables, self.transform = Tables(self.fft, config.threads), Transform(self.fft)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        H, notes = fake.sym(), lambda: None
        if self.gradient:
            notes = lambda: fake.tensor("int32", (fake.sym(), fake.sym(), fake.sym()), align=4)
        x, other = (fake.tensor("fp16", (fake.sym(divisibility=ROWS), COLS)) for _ in range(2))
        exponents = fake.tensor("int32", (H, fake.sym()), align=4)
        return x, (other, notes(), notes(), exponents, Int32(0), Int32(0), Int32(0)), Int32(0)

    @cute.jit
    def __call__(self, x: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind x, but for x once more."""
        g = Given(tk.gl.load(x, TILE), tk.gl.load(others[0], TILE), tk.gl.store(x, TILE), *others[1:])
        self.kernel(g).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        al, n, wg, me = tk.SharedAllocator(), self.config.warpgroups, tk.warpgroup_id(), cute.arch.thread_idx()[0]
        rows, columns = self.transform.factors(al)
        tiles = al.tile(TILE, self.planes * STAGES * n)
        full = al.semaphores(STAGES * n)
        twiddles = al.allocate_tensor(Float32, tk.powers(tk.WARPGROUP), 16)
        largest, numbers = (al.allocate_tensor(Int32, cute.make_layout((4, n)), 16) for _ in range(2))
        table = None
        if const_expr(self.spec.split or not self.gradient):
            kind = Float32 if self.spec.split else Float16
            table = al.allocate_tensor(kind, tk.factors(tk.WARPGROUP, COLS, n), 16)[None, None, None, wg]
        factors = Factors(rows, columns, twiddles)
        tk.init_block(lambda: [tk.init(full[i], 1) for i in range(STAGES * n)])
        self.tables.fill_rows(rows, me)
        self.tables.fill_columns(factors.columns, me)
        self.tables.fill_twiddles(twiddles)
        s = Shared(factors, tiles, full, table, largest[None, wg], numbers[None, wg])
        s.number[0] = wg
        tk.publish()
        tk.sync_block()
        self.run(g, s, wg)

    @cute.jit
    def run(self, g: Given, s: Shared, wg):
        """All tiles of a warpgroup."""
        H, across = g.exponents.shape
        n = self.config.warpgroups
        first, step = cute.arch.block_idx()[0] * n + wg, cute.arch.grid_dim()[0] * n
        each = 2 * g.batch if const_expr(self.gradient) else g.batch + 1
        tiles = cutlass.max(0, (H * across - first + step - 1) // step)
        shift = (Float32(across).bitcast(Int32) >> EXPONENT) - 127
        w = Work(wg, first, step, tiles, each, shift)
        self.fetch(g, s, w, (Int32(0), Int32(0), 0))
        for i in cutlass.range(tiles, unroll=1):
            self.head(g, s, w, i)
        if tk.first_warp_of_group():
            tk.store_wait(read=False)

    @cute.jit
    def fetch(self, g: Given, s: Shared, w: Work, at):
        """Load an operand, once what its tiles had has been stored. at: (number of the tile, of its operand, stage)"""
        i, which, stage = at
        if tk.first_warp_of_group():
            if i < w.tiles:
                tk.store_wait()
                (head, tile), step = w.place(i), Int32(1) << w.shift
                full, tiles = s.full[STAGES * w.wg + stage], self.tiles(s, w, stage)
                tk.expect_bytes(full, self.planes * TILE.bytes)
                if const_expr(self.gradient):
                    first = (((head * g.batch + (which >> 1)) * self.planes) << w.shift) + tile
                    if which % 2 == 0:
                        self.load(tiles, g.x, first, step, full)
                    else:
                        self.load(tiles, g.other, first, step, full)
                else:
                    if which == 0:
                        self.load(tiles, g.other, ((head * self.planes) << w.shift) + tile, step, full)
                    else:
                        first = (((head * g.batch + which - 1) * self.planes) << w.shift) + tile
                        self.load(tiles, g.x, first, step, full)

    def load(self, tiles, x: tk.gl, first, step, full):
        """All planes of an operand."""
        for of in range(self.planes):
            tk.load_async(tiles[of], x, (first + of * step, 0), full)

    def tiles(self, s: Shared, w: Work, stage):
        """Of a stage."""
        first = self.planes * (STAGES * w.wg + stage)
        return [s.tiles[first + of] for of in range(self.planes)]

    @cute.jit
    def forth(self, acc: tk.Pair, narrow: tk.Pair, g: Given, s: Shared, at):
        """acc = the transform of an operand, while the next one is loaded. at: (`Work`, number of the tile, of its
        operand, stage, phase)"""
        w, i, which, stage, phase = at
        tk.wait(s.full[STAGES * w.wg + stage], phase)
        self.transform.forth(acc, narrow, self.tiles(s, w, stage), s.factors)
        tk.sync(1 + w.wg, tk.WARPGROUP)  # all have done with the operand before, and with its results' tiles
        last = which == w.each - 1
        self.fetch(g, s, w, (cutlass.select_(last, i + 1, i), cutlass.select_(last, 0, which + 1), 1 - stage))

    @cute.jit
    def head(self, g: Given, s: Shared, w: Work, i):
        """A tile of a head's sequences."""
        acc, narrow, barrier, first = tk.pair(COLS), self.transform.narrow(), 1 + w.wg, i * w.each
        self.forth(acc, narrow, g, s, (w, i, Int32(0), first % STAGES, first // STAGES & 1))
        self.note(g, w, i, self.normalize(acc, s.largest, barrier, Float32(g.conjugate)))
        tk.complex_to_table(s.table, acc)
        for j in cutlass.range(first + 1, first + w.each, unroll=1):
            self.forth(acc, narrow, g, s, (w, i, j - first, j % STAGES, j // STAGES & 1))
            if const_expr(self.spec.split):
                w = w._replace(wg=s.number[0])
            tk.complex_mul_table(acc, acc, s.table)
            tk.complex_copy(narrow, acc, conjugate=True)
            tiles = self.tiles(s, w, j % STAGES)
            self.transform.back(acc, narrow, tiles, s.factors, barrier)
            self.store(g, narrow, acc, tiles, (w, i, j - first - 1))

    @cute.jit
    def note(self, g: Given, w: Work, i, exponent):
        """What a tile has been divided by."""
        head, tile = w.place(i)
        if tk.thread_in_warpgroup() == 0:
            g.exponents[head, tile] = exponent

    @cute.jit
    def normalize(self, acc: tk.Pair, largest: cute.Tensor, barrier, conjugate, above: cutlass.Constexpr = 0):
        """acc divided by a power of 2, which brings its numbers below 2^(above + 1) and whose exponent is returned; the
        imaginary part times `conjugate`."""
        most = Int32(0)
        for i in cutlass.range_constexpr(COLS // 2):
            most = cutlass.max(most, cutlass.max(magnitude(acc.real.tensor[i]), magnitude(acc.imag.tensor[i])))
        most = largest_of_warpgroup(most, largest, barrier)
        down, up = power(most, above)
        for i in cutlass.range_constexpr(COLS // 2):
            acc.real.tensor[i] = acc.real.tensor[i] * down
            acc.imag.tensor[i] = acc.imag.tensor[i] * (down * conjugate)
        return up.bitcast(Int32) >> 23

    @cute.jit
    def store(self, g: Given, narrow: tk.Pair, acc: tk.Pair, tiles, at):
        """The result in memory, rounded, by way of the tiles. at: (`Work`, the number of the tile, batch index)."""
        w, i, batch = at
        tk.complex_copy(narrow, acc)
        tk.sync(1 + w.wg, tk.WARPGROUP)  # all have done with the tiles
        self.transform.put(tiles, narrow)
        tk.publish()
        tk.sync(1 + w.wg, tk.WARPGROUP)
        if tk.first_warp_of_group():
            head, tile = w.place(i)
            first = (((head * g.batch + batch) * self.planes) << w.shift) + tile
            for part in cutlass.range_constexpr(self.planes):
                tk.store_async(g.to, tiles[part], (first + (part << w.shift), 0))


class RowsGradient(Rows):
    """x's first sequence = the inverse transform of the sum over sequences of conj(X) Y, X and Y the transforms of x
    and of the other, as the rows' part of a filter's gradient.

    As in `Rows`, but that products are added up in registers, in the sequences' order: the same bits in every run. Each
    product gets back what both were divided by; the sum is divided by a power of 2 near its largest number.
    """

    gradient = True

    @cute.jit
    def head(self, g: Given, s: Shared, w: Work, i):
        acc, narrow, barrier = tk.pair(COLS), self.transform.narrow(), 1 + w.wg
        spectrum = s.table if const_expr(self.spec.split) else tk.pair(COLS, Float16)
        total = tk.pair(COLS)
        tk.zero(total.real)
        tk.zero(total.imag)
        for batch in cutlass.range(g.batch, unroll=1):
            phase = i * g.batch + batch & 1
            self.forth(acc, narrow, g, s, (w, i, 2 * batch, 0, phase))
            if const_expr(self.spec.split):
                tk.complex_to_table(spectrum, acc)
            else:
                tk.complex_copy(spectrum, acc)
            self.forth(acc, narrow, g, s, (w, i, 2 * batch + 1, 1, phase))
            tk.complex_fma_conj(total, spectrum, acc, self.both(g, w.place(i)[0], batch))
        self.note(g, w, i, self.normalize(total, s.largest, barrier, Float32(1.0), ABOVE if self.spec.split else 0))
        tk.complex_copy(narrow, total, conjugate=True)
        w = w._replace(wg=s.number[0])
        tiles = self.tiles(s, w, 1)
        self.transform.back(acc, narrow, tiles, s.factors, 1 + w.wg)
        self.store(g, narrow, acc, tiles, (w, i, Int32(0)))

    @cute.jit
    def both(self, g: Given, head, batch):
        """What a product of two spectra is multiplied by, in each row: what both were divided by."""
        first, second = (largest_of(x[head, batch, None]) for x in (g.largest, g.other_largest))
        by, exponent = tk.rv(), exponent_of(first) + exponent_of(second) - 2 * (127 + g.above)
        for r in cutlass.range_constexpr(2):
            by.tensor[r] = cutlass.select_(cutlass.max(first, second) < INFINITE, power_of_two(exponent),
                                           Float32.inf - Float32.inf)
        return by
