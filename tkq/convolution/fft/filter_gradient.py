"""The spectrum of a filter's gradient: of each head the sum over its sequences of conj(V) W, V and W the spectra of
v = pre * u and w = post * dy."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.sequences import Place, Sequences, put_run
from tkq.convolution.fft.spec import COLS, ROWS
from tkq.convolution.fft.tables import EXPONENT, Tables, power_of
from tkq.convolution.fft.transform import TILE, Factors, Transform
from tkq.runtime.compile import fake

BLOCK = ROWS * COLS  # tokens
FIRST, LAST = 10, 250  # exponents of largest numbers as they are taken: smaller and larger ones count as these
BIAS = 127
ABOVE = 8  # inputs are brought below 2^9: spectra stay below 65504, also of pairs


class Given(NamedTuple):
    """u, dy (B, H, L) and their gates; sums (H, blocks, splits, 16, 128, 4) fp32, of the layout `tkq.tile.factors`, the
    last dimension first; parts in which a head's tiles go to blocks."""

    u: cute.Tensor
    dy: cute.Tensor
    pre: Optional[cute.Tensor]
    post: Optional[cute.Tensor]
    sums: cute.Tensor
    splits: Int32


class Shared(NamedTuple):
    """A block's: factors, the head's sum. A warpgroup's: tiles, largest numbers of v and of w; of two blocks of tokens
    the spectrum last transformed, and of all warpgroups the sums of the first block of v with the second of w."""

    factors: Factors
    total: cute.Tensor
    tiles: tk.SharedTile
    of_rows: cute.Tensor
    of_v: cute.Tensor
    of_w: cute.Tensor
    last: Optional[cute.Tensor]
    apart: Optional[cute.Tensor]


class FilterGradient:
    """A block has a head after the other, each warpgroup a tile of its sequences after the other, and adds up its
    spectra's products in registers; at the head's end the warpgroups add theirs, one after the other.

    Each sequence of v and of w is divided by a power of 2 near its largest number, which the product gets back. Of a
    circular convolution two sequences are a complex one, v + iv', w + iw': of conj(V) W the inverse transform's real
    part is the sum of what each of the two gives. To that end both must have the same scale: v is divided as before, w
    multiplied by that and divided by one of the pair.

    Sequences of two blocks of 4096 tokens have two sums: of each block of w with the same one of v, in registers, and
    of the second one of w with the first one of v, in shared memory, each thread's for itself.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.tables, self.transform = Tables(spec, config.threads), Transform(spec)
        self.sequences = Sequences(spec, tk.element_type(spec.dtype))

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any sizes and strides, but of neighbouring tokens."""
        spec, B, H, L = self.spec, fake.sym(), fake.sym(), fake.sym(divisibility=self.spec.vector)

        def operand():
            steps = [fake.sym64(divisibility=spec.vector) for _ in range(2)]
            return fake.tensor(spec.dtype, (B, H, L), (*steps, 1), align=2 * spec.vector)

        gates = [operand() if there else None for there in (spec.pre, spec.post)]
        sums = fake.tensor("fp32", (H, fake.sym(), fake.sym(), 16, tk.WARPGROUP, 4))
        return operand(), (operand(), *gates, sums, Int32(0)), Int32(0)

    @cute.jit
    def __call__(self, u: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind u."""
        self.kernel(Given(u, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        spec, al, n = self.spec, tk.SharedAllocator(), self.config.warpgroups
        rows, columns = al.tile(TILE, 2 * spec.tiles), al.tile(TILE, 3)
        tiles = al.tile(TILE, spec.tiles * n)
        total = al.allocate_tensor(Float32, tk.factors(tk.WARPGROUP, COLS), 16)
        twiddles = al.allocate_tensor(Float32, tk.powers(tk.WARPGROUP), 16)
        of_rows, of_v, of_w = (al.allocate_tensor(Int32, cute.make_layout((spec.tiles * ROWS, n)), 16)
                               for _ in range(3))
        factors = Factors(rows, tk.SharedPair(columns[0], columns[1], columns[2]), twiddles)
        wg, me, last, apart = tk.warpgroup_id(), cute.arch.thread_idx()[0], None, None
        if const_expr(spec.blocks > 1):
            last = al.allocate_tensor(Float16, tk.factors(tk.WARPGROUP, COLS, n), 16)[None, None, None, wg]
            apart = al.allocate_tensor(Float32, tk.factors(tk.WARPGROUP, COLS, n), 16)
        self.tables.fill_rows(rows, me)
        self.tables.fill_columns(factors.columns, me)
        self.tables.fill_twiddles(twiddles)
        tk.publish()
        tk.sync_block()
        s = Shared(factors, total, tiles, of_rows[None, wg], of_v[None, wg], of_w[None, wg], last, apart)
        for item in cutlass.range(cute.arch.block_idx()[0], g.u.shape[1] * g.splits, cute.arch.grid_dim()[0], unroll=1):
            self.head(g, s, item // g.splits, item % g.splits, wg)

    @cute.jit
    def head(self, g: Given, s: Shared, head, part, wg):
        """The tiles of a part of a head's sequences, and their sums."""
        each, n, total = self.spec.sequences, self.config.warpgroups, tk.pair(COLS)
        tk.zero(total.real)
        tk.zero(total.imag)
        if const_expr(self.spec.blocks > 1):
            for i in cutlass.range_constexpr(COLS // 4):
                s.apart[None, tk.thread_in_warpgroup(), i, wg].fill(0.0)
        for tile in cutlass.range(part * n + wg, cute.ceil_div(g.u.shape[0], each), n * g.splits, unroll=1):
            at = Place(head, tile * each, Int32(0))
            if const_expr(self.spec.blocks > 1):
                self.two(g, s, at, total, wg)
            else:
                self.tile(g, s, at, total, wg)
        for other in cutlass.range_constexpr(n):
            if wg == other:
                tk.complex_to_table(s.total, total, other > 0)
            tk.sync_block()
        for i in cutlass.range(wg, COLS // 4, n, unroll=1):
            self.leave(g.sums[head, 0, part, i, tk.thread_in_warpgroup(), None], [s.total], i)
            if const_expr(self.spec.blocks > 1):
                self.leave(g.sums[head, 1, part, i, tk.thread_in_warpgroup(), None],
                           [s.apart[None, None, None, w] for w in range(n)], i)
        tk.sync_block()

    def leave(self, to, tables, i):
        """A thread's i-th four numbers of the tables' sum, in memory."""
        found = cute.make_rmem_tensor((4,), Float32)
        cute.autovec_copy(tables[0][None, tk.thread_in_warpgroup(), i], found)
        for table in tables[1:]:
            four = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(table[None, tk.thread_in_warpgroup(), i], four)
            for e in range(4):
                found[e] = found[e] + four[e]
        cute.autovec_copy(found, to)

    @cute.jit
    def tile(self, g: Given, s: Shared, at, total: tk.Pair, wg):
        spec, (acc, narrow), spectrum = self.spec, (tk.pair(COLS), tk.pair(COLS, Float16)), tk.pair(COLS, Float16)
        self.forth(acc, narrow, g, s, (at, False, wg))
        tk.copy(spectrum.real, acc.real)
        tk.copy(spectrum.imag, acc.imag)
        self.forth(acc, narrow, g, s, (at, True, wg))
        back = tk.rv()
        for r in cutlass.range_constexpr(2):
            first = (tk.first_row() + 8 * r) // spec.rows * spec.rows
            back.tensor[r] = power_of(self.of_both(s, first) - 2 * (BIAS + ABOVE))
        tk.complex_fma_conj(total, spectrum, acc, back)

    @cute.jit
    def two(self, g: Given, s: Shared, at, total: tk.Pair, wg):
        """A sequence of two blocks, each transformed once: v and w of the second, v and w of the first."""
        acc, narrow, apart = tk.pair(COLS), tk.pair(COLS, Float16), s.apart[None, None, None, wg]
        for j in cutlass.range(2, unroll=1):
            place = at._replace(token=(1 - j) * BLOCK)
            self.forth(acc, narrow, g, s, (place, False, wg))
            if j == 1:
                self.add(apart, s.last, acc, self.back(s))
            tk.complex_to_table(s.last, acc)
            self.forth(acc, narrow, g, s, (place, True, wg))
            self.add(total, s.last, acc, self.back(s))
            tk.complex_to_table(s.last, acc)

    def back(self, s: Shared):
        """What a product of spectra is multiplied by: what both were divided by. Of whole sequences, not of pairs."""
        return power_of(self.exponent(s.of_v, 0, 0) + self.exponent(s.of_w, 0, 0) - 2 * (BIAS + ABOVE))

    def add(self, to, table, other: tk.Pair, by):
        """A pair += by conj(table) other, or a table += by table conj(other); each thread, its own elements."""
        for i in range(COLS // 4):
            held, four = cute.make_rmem_tensor((4,), Float16), cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(table[None, tk.thread_in_warpgroup(), i], held)
            if not isinstance(to, tk.Pair):
                there = to[None, tk.thread_in_warpgroup(), i]
                cute.autovec_copy(there, four)
            for e in range(2):
                at, x, y = 2 * i + e, Float32(held[e]), Float32(held[2 + e])
                c, d = other.real.tensor[at], other.imag.tensor[at]
                real, imag = by * (x * c + y * d), by * (x * d - y * c)
                if isinstance(to, tk.Pair):
                    to.real.tensor[at], to.imag.tensor[at] = to.real.tensor[at] + real, to.imag.tensor[at] + imag
                else:
                    four[2 * e], four[2 * e + 1] = four[2 * e] + real, four[2 * e + 1] - imag
            if not isinstance(to, tk.Pair):
                cute.autovec_copy(four, there)

    @cute.jit
    def forth(self, acc: tk.Pair, narrow: tk.Pair, g: Given, s: Shared, what):
        """acc = the spectrum of v or of w. what: (place, is it w?, warpgroup)"""
        (place, of_w, wg), n = what, self.spec.tiles
        tiles = [s.tiles[n * wg + i] for i in range(n)]
        self.load(g, s, place, (tiles, 1 + wg), of_w)
        self.transform.forth(acc, narrow, tiles, s.factors)

    @cute.jit
    def load(self, g: Given, s: Shared, place: Place, at, of_w: cutlass.Constexpr):
        """The tiles of v or of w, scaled, in shared memory. at: (tiles, barrier); what was in the tiles has been
        used."""
        (tiles, barrier), n = at, self.spec.tiles
        x, gate, largest = (g.dy, g.post, s.of_w) if of_w else (g.u, g.pre, s.of_v)
        values = [cute.make_rmem_tensor((8, 4), Float32) for _ in range(n)]
        for i in cutlass.range_constexpr(n):
            self.sequences.load(values[i], x, gate, place, i)
            self.sequences.largest_of_tile(values[i], s.of_rows, i)
        tk.sync(barrier, tk.WARPGROUP)
        self.sequences.largest_of_sequences(s.of_rows, largest)
        tk.sync(barrier, tk.WARPGROUP)
        self.put(tiles, values, s, of_w)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)

    @cute.jit
    def put(self, tiles, values, s: Shared, of_w: cutlass.Constexpr):
        """The input tiles in shared memory, scaled."""
        for tile in cutlass.range_constexpr(self.spec.tiles):
            for i in cutlass.range_constexpr(4):
                row, col = self.sequences.mine(i)
                if const_expr(of_w):
                    by = BIAS + ABOVE + self.exponent(s.of_v, tile, row) - self.of_both(s, row)
                    first, second = power_of(by // 2), power_of(by - by // 2)
                else:
                    first, second = power_of(BIAS + ABOVE - self.exponent(s.of_v, tile, row)), Float32(1.0)
                put_run(tiles[tile], [values[tile][e, i] * first * second for e in range(8)], row, col)

    def exponent(self, largest, tile, row):
        """Of the largest number of a row's sequence, as it is taken."""
        return cutlass.min(cutlass.max(self.sequences.largest(largest, tile, row) >> EXPONENT, FIRST), LAST)

    def of_both(self, s: Shared, row):
        """The exponents of v's and w's largest numbers together; of a pair those of the sequence that has more."""
        sums = [self.exponent(s.of_v, of, row) + self.exponent(s.of_w, of, row) for of in range(self.spec.tiles)]
        return sums[0] if self.spec.causal else cutlass.max(*sums)
