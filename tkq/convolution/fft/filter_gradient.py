"""The spectrum of a filter's gradient: of each head the sum over its sequences of conj(V) W, V and W the spectra of
v = pre * u and w = post * dy."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.halves import Halves
from tkq.convolution.fft.operands import Operands
from tkq.convolution.fft.sequences import Place
from tkq.convolution.fft.spec import COLS, ROWS
from tkq.convolution.fft.tables import BIAS, EXPONENT, Tables, power_of, power_of_two
from tkq.convolution.fft.tokens import Tokens
from tkq.convolution.fft.transform import TILE, Factors
from tkq.runtime.compile import fake
from tkq.tile import woven

BLOCK = ROWS * COLS  # tokens
FIRST, LAST = 10, 250  # exponents of largest numbers as they are taken: smaller and larger ones count as these
ABOVE = 8  # inputs are brought below 2^9: spectra stay below 65504, also of pairs


class Given(NamedTuple):
    """u, dy (B, H, L) and their gates; sums (H, blocks, splits, 16, `FftSpec.summed_threads`, 4) fp32, of the layout
    `tkq.tile.factors`, the last dimension first; parts in which a head's tiles go to blocks."""

    u: cute.Tensor
    dy: cute.Tensor
    pre: Optional[cute.Tensor]
    post: Optional[cute.Tensor]
    sums: cute.Tensor
    splits: Int32


class Shared(NamedTuple):
    """A block's: factors, the head's sum. A warpgroup's: tiles of v and of w, magnitudes of its warps, the spectrum
    last transformed; of two blocks of tokens all warpgroups' sums of the first block of v with the second of w."""

    factors: Factors
    total: cute.Tensor
    tiles: tk.SharedTile
    of_warps: cute.Tensor
    last: cute.Tensor
    apart: Optional[cute.Tensor]


class Work(NamedTuple):
    """Of a warpgroup: its number, head, part of that, first tile, and the head and the first tile after that part."""

    wg: Int32
    head: Int32
    part: Int32
    first: Int32
    next_head: Int32
    next_first: Int32


class FilterGradient:
    """A block has a head after the other, each warpgroup a tile of its sequences after the other, and adds up its
    spectra's products in registers; at the head's end the warpgroups add theirs, one after the other.

    Each sequence of v and of w is divided by a power of 2 near its largest number, which the product gets back. Of a
    circular convolution two sequences are a complex one, v + iv', w + iw': of conj(V) W the inverse transform's real
    part is the sum of what each of the two gives. To that end both must have the same scale: v is divided as before, w
    multiplied by that and divided by one of the pair.

    An operand's numbers are loaded while the one before is transformed.

    Sequences of two blocks of 4096 tokens have two sums: of each block of w with the same one of v, in registers, and
    of the second one of w with the first one of v, in shared memory, each thread's for itself.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.tables, self.transform = Tables(spec, config.threads, halves=True), Halves(spec)
        self.tokens = Tokens(spec, tk.element_type(spec.dtype))

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        operands = Operands(self.spec)
        sums = fake.tensor("fp32", (operands.H, fake.sym(), fake.sym(), 16, self.spec.summed_threads, 4))
        return operands.one(), (operands.one(), *operands.gates(), sums, Int32(0)), Int32(0)

    @cute.jit
    def __call__(self, u: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind u."""
        self.kernel(Given(u, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                              min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        spec, al, n, wg = self.spec, tk.SharedAllocator(), self.config.warpgroups, tk.warpgroup_id()
        factors, tiles, apart = self.transform.factors(al), al.tile(TILE, 2 * spec.tiles * n), None
        total = al.allocate_tensor(Float32, tk.factors(tk.WARPGROUP, COLS), 16)
        last = al.allocate_tensor(Float16, woven.woven_factors(Float16, n), 16)[None, None, None, wg]
        of_warps = al.allocate_tensor(Int32, cute.make_layout((4, spec.tiles, n)), 16)
        if const_expr(spec.blocks > 1):
            apart = al.allocate_tensor(Float32, tk.factors(tk.WARPGROUP, COLS, n), 16)
        self.transform.fill(factors, self.tables, cute.arch.thread_idx()[0])
        tk.publish()
        tk.sync_block()
        s = Shared(factors, total, tiles, of_warps[None, None, wg], last, apart)
        asked = [self.tokens.asked(g.pre if g.pre is not None else g.post) for _ in range(spec.tiles)]
        first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        head, tile = self.of_item(g, first, wg)
        self.ask(g, asked, (head, tile, Int32(spec.blocks - 1)), False)
        for item in cutlass.range(first, g.u.shape[1] * g.splits, step, unroll=1):
            head, tile = self.of_item(g, item, wg)
            self.head(g, s, asked, Work(wg, head, item % g.splits, tile, *self.of_item(g, item + step, wg)))
        cute.arch.griddepcontrol_launch_dependents()

    def of_item(self, g: Given, item, wg):
        """(head, first tile) of a warpgroup; behind the last one a tile that is not there."""
        head, part = item // g.splits, item % g.splits
        there = head < g.u.shape[1]
        return (cutlass.select_(there, head, Int32(0)),
                cutlass.select_(there, part * self.config.warpgroups + wg, g.u.shape[0]))

    def ask(self, g: Given, asked, place, of_w):
        """Load the numbers of v or of w. place: (head, tile, block of tokens)"""
        head, tile, block = place
        x, gate = (g.dy, g.post) if of_w else (g.u, g.pre)
        for i, to in enumerate(self.held(g, asked, of_w)):
            self.tokens.ask(to, x, gate, Place(head, tile * self.spec.sequences, block * BLOCK), i)

    def held(self, g: Given, asked, of_w):
        """Registers of those that have v or w."""
        gate = g.post if of_w else g.pre
        return [x if gate is not None else x._replace(gate=None) for x in asked]

    @cute.jit
    def head(self, g: Given, s: Shared, asked, w: Work):
        """The tiles of a part of a head's sequences, and their sums."""
        n, total = self.config.warpgroups, tk.pair(COLS)
        tiles, step = cute.ceil_div(g.u.shape[0], self.spec.sequences), n * g.splits
        tk.zero(total.real)
        tk.zero(total.imag)
        if const_expr(self.spec.blocks > 1):
            for i in cutlass.range_constexpr(COLS // 4):
                s.apart[None, tk.thread_in_warpgroup(), i, w.wg].fill(0.0)
        if w.first >= tiles:
            self.ask(g, asked, (w.next_head, w.next_first, Int32(self.spec.blocks - 1)), False)
        for tile in cutlass.range(w.first, tiles, step, unroll=1):
            last = tile + step >= tiles
            after = (cutlass.select_(last, w.next_head, w.head), cutlass.select_(last, w.next_first, tile + step))
            if const_expr(self.spec.blocks > 1):
                self.two(g, s, asked, total, (w, tile, after))
            else:
                self.tile(g, s, asked, total, (w, tile, after))
        for other in cutlass.range_constexpr(n):
            if w.wg == other:
                tk.complex_to_table(s.total, total, other > 0)
            tk.sync_block()
        threads = self.spec.summed_threads
        for item in cutlass.range(cute.arch.thread_idx()[0], COLS // 4 * threads, self.config.threads, unroll=1):
            at, i = item % threads, item // threads
            self.leave(g.sums[w.head, 0, w.part, i, at, None],
                       [s.total[None, at + of, i] for of in range(0, tk.WARPGROUP, threads)])
            if const_expr(self.spec.blocks > 1):
                self.leave(g.sums[w.head, 1, w.part, i, at, None], [s.apart[None, at, i, of] for of in range(n)])
        tk.sync_block()

    def leave(self, to, places):
        """The sum of fours of numbers, in memory."""
        found = cute.make_rmem_tensor((4,), Float32)
        cute.autovec_copy(places[0], found)
        for there in places[1:]:
            four = cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(there, four)
            for e in range(4):
                found[e] = found[e] + four[e]
        cute.autovec_copy(found, to)

    @cute.jit
    def tile(self, g: Given, s: Shared, asked, total: tk.Pair, at):
        """at: (`Work`, tile, head and tile after it)"""
        (w, tile, after), acc, back = at, tk.pair(COLS), tk.rv()
        of_v, of_w = (cute.make_rmem_tensor((2, self.spec.tiles), Int32) for _ in range(2))
        self.forth(acc, g, s, asked, (w, (w.head, tile, Int32(0)), of_v, None))
        self.keep(s, acc)
        self.forth(acc, g, s, asked, (w, (*after, Int32(0)), of_v, of_w))
        self.back(back, of_v, of_w)
        for part in cutlass.range_constexpr(2):
            tk.mma_wait(1 - part)
            woven.woven_fma_conj(total, s.last, acc, back, part)

    @cute.jit
    def two(self, g: Given, s: Shared, asked, total: tk.Pair, at):
        """A sequence of two blocks, each transformed once: v and w of the second, v and w of the first."""
        (w, tile, after), acc, back = at, tk.pair(COLS), tk.rv()
        of_v, of_w = (cute.make_rmem_tensor((2, 1), Int32) for _ in range(2))
        of_w.fill(0)
        for j in cutlass.range(2, unroll=1):
            self.forth(acc, g, s, asked, (w, (w.head, tile, 1 - j), of_v, None))
            tk.mma_wait()
            if j == 1:
                self.back(back, of_v, of_w)
                woven.woven_fma_to(s.apart[None, None, None, w.wg], s.last, acc, back.tensor[0])
            woven.woven_keep(s.last, acc)
            following = cutlass.select_(j == 0, w.head, after[0]), cutlass.select_(j == 0, tile, after[1]), j
            self.forth(acc, g, s, asked, (w, following, of_v, of_w))
            self.back(back, of_v, of_w)
            for part in cutlass.range_constexpr(2):
                tk.mma_wait(1 - part)
                woven.woven_fma_conj(total, s.last, acc, back, part)
                woven.woven_keep(s.last, acc, part)

    def keep(self, s: Shared, acc: tk.Pair):
        """A spectrum, as soon as each half is there."""
        for part in range(2):
            tk.mma_wait(1 - part)
            woven.woven_keep(s.last, acc, part)

    def back(self, to: tk.RowVec, of_v, of_w):
        """What a product of spectra is multiplied by: what both were divided by."""
        for r in range(2):
            to.tensor[r] = power_of_two(self.of_both(of_v, of_w, r) - 2 * (BIAS + ABOVE))

    @cute.jit
    def forth(self, acc: tk.Pair, g: Given, s: Shared, asked, what):
        """acc, woven = the spectrum of v or of w, of the numbers asked for; then the next ones are. what: (`Work`,
        (head, tile, block) of the next ones, largest magnitudes of v, those of w, or None where v is transformed)"""
        (w, following, of_v, of_w), narrow, n = what, tk.pair(COLS, Float16), self.spec.tiles
        is_w, barrier = of_w is not None, 1 + w.wg
        of, held = of_w if is_w else of_v, self.held(g, asked, is_w)
        tiles = [s.tiles[n * (2 * w.wg + is_w) + i] for i in range(n)]
        self.tokens.note(of, held, s.of_warps)
        if const_expr(self.spec.rows > 16):
            tk.sync(barrier, tk.WARPGROUP)
        self.tokens.largest(of, s.of_warps)
        for i in cutlass.range_constexpr(n):
            to = narrow.imag if const_expr(i) else narrow.real
            self.tokens.scaled(to, held[i], self.factors(of_v, of_w, i))
        self.transform.put(tiles, narrow)
        self.transform.written()
        self.ask(g, asked, following, not is_w)
        self.transform.meet(barrier)
        self.transform.forth(acc, narrow, tiles, s.factors)

    def factors(self, of_v, of_w, tile):
        """What a tile of v (of_w: None) or of w is multiplied by, as `Tokens.scaled` takes it."""
        circular = of_w is not None and not self.spec.causal
        by = cute.make_rmem_tensor((2 if circular else 1, 2), Float32)
        for r in range(2):
            exponent = BIAS + ABOVE
            if of_w is None:
                exponent = exponent - self.exponent(of_v, tile, r)
            else:
                exponent = exponent + self.exponent(of_v, tile, r) - self.of_both(of_v, of_w, r)
            by[0, r] = power_of(exponent // 2 if circular else exponent)
            if circular:
                by[1, r] = power_of(exponent - exponent // 2)
        return by

    def exponent(self, most, tile, r):
        """Of the largest number of the sequence of one of a thread's rows, as it is taken."""
        return cutlass.min(cutlass.max(most[r, tile] >> EXPONENT, FIRST), LAST)

    def of_both(self, of_v, of_w, r):
        """The exponents of v's and w's largest numbers together; of a pair those of the sequence that has more."""
        sums = [self.exponent(of_v, tile, r) + self.exponent(of_w, tile, r) for tile in range(self.spec.tiles)]
        return sums[0] if self.spec.causal else cutlass.max(*sums)
