"""The spectra of filters in fp16, as `InRegisters` reads them."""
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.halves import Halves
from tkq.convolution.fft.sequences import Place
from tkq.convolution.fft.spec import COLS, COLUMN_SCALE, ROWS, row_scale
from tkq.convolution.fft.tables import INFINITE, Tables, magnitude, power
from tkq.convolution.fft.tokens import EACH, Tokens
from tkq.convolution.fft.transform import TILE
from tkq.runtime.compile import fake
from tkq.tile import woven

ABOVE = 6  # taps are brought below 2^7: their transforms stay below 65504


class Given(NamedTuple):
    """taps (H, n) fp32; spectra (H, blocks, 8192) fp16, each of the layout `tkq.tile.woven.woven_factors`; scales (H),
    what products are multiplied by."""

    taps: cute.Tensor
    spectra: cute.Tensor
    scales: cute.Tensor


class Filters:
    """A warpgroup has a head after the other. A filter is divided by a power of 2 near its largest tap and transformed
    as a sequence is, in each transform that a tile has room for; so is its spectrum.

    Of two blocks of taps, f and g, the second part's spectrum is that of g - i f: G - i F.
    """

    def __init__(self, spec, config):
        self.spec, self.config = spec, config
        self.tables, self.transform = Tables(spec, config.threads, halves=True), Halves(spec)
        self.tokens = Tokens(spec, Float16)

    # ---- host ----------------------------------------------------------------------------------

    def fake_arguments(self):
        """Compiled for any sizes and strides."""
        H = fake.sym()
        taps = fake.tensor("fp32", (H, fake.sym()), (fake.sym64(), fake.sym64()), align=4)
        return taps, (fake.tensor("fp16", (H, self.spec.blocks, 2 * ROWS * COLS)), fake.tensor("fp32", (H,), align=4)), \
            Int32(0)

    @cute.jit
    def __call__(self, taps: cute.Tensor, others, blocks: Int32, stream: cuda.CUstream):
        """others: those of `Given` behind taps."""
        self.kernel(Given(taps, *others)).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream,
                                                 min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Given):
        al, n, wg = tk.SharedAllocator(), self.config.warpgroups, tk.warpgroup_id()
        factors, tiles, before = self.transform.factors(al), al.tile(TILE, n), None
        of_warps = al.allocate_tensor(Int32, cute.make_layout((4, n)), 16)
        if const_expr(self.spec.blocks > 1):
            before = self.transform.spectra(al, n)[None, None, None, wg]
        self.transform.fill(factors, self.tables, cute.arch.thread_idx()[0])
        tk.publish()
        tk.sync_block()
        for head in cutlass.range(cute.arch.block_idx()[0] * n + wg, g.taps.shape[0], cute.arch.grid_dim()[0] * n,
                                  unroll=1):
            self.head(g, (factors, tiles[wg], of_warps[None, wg], before), head, 1 + wg)

    @cute.jit
    def head(self, g: Given, shared, head, barrier):
        """shared: (factors, a tile, an int for each warp, of two blocks room for the first one's spectrum)"""
        (factors, tile, of_warps, before), spec = shared, self.spec
        values = [cute.make_rmem_tensor((COLS // 2,), Float32) for _ in range(spec.blocks)]
        most = Int32(0)
        for block in cutlass.range_constexpr(spec.blocks):
            self.load(values[block], g.taps, Place(head, Int32(0), Int32(block * ROWS * COLS)))
        for block in cutlass.range_constexpr(spec.blocks):
            for i in cutlass.range_constexpr(COLS // 2):
                most = cutlass.max(most, magnitude(values[block][i]))
        most = self.of_warpgroup(most, of_warps, barrier)
        down, up = power(most, ABOVE)
        acc, narrow, largest = tk.pair(COLS), tk.pair(COLS, Float16), Int32(0)
        for block in cutlass.range_constexpr(spec.blocks):
            for i in cutlass.range_constexpr(COLS // 2):
                narrow.real.tensor[i] = Float16(values[block][i] * down)
            tk.sync(barrier, tk.WARPGROUP)  # all have done with the tile, and with largest numbers
            tk.store(tile, narrow.real)
            tk.publish()
            tk.sync(barrier, tk.WARPGROUP)
            self.transform.forth(acc, narrow, [tile], factors)
            if const_expr(block < spec.blocks - 1):
                woven.woven_keep(before, acc)
            elif const_expr(block > 0):
                woven.woven_sub_turned(acc, before)
            for i in cutlass.range_constexpr(COLS // 2):
                both = cutlass.max(magnitude(acc.real.tensor[i]), magnitude(acc.imag.tensor[i]))
                largest = cutlass.max(largest, both)
        small, large = power(self.of_warpgroup(largest, of_warps, barrier), 0)
        sign = Float32(-1.0 if spec.conjugate else 1.0)
        to = lambda part: cute.make_tensor(g.spectra[head, part, None].iterator, woven.woven_factors(Float16))
        woven.woven_leave(to(spec.blocks - 1), acc, small, sign)
        if const_expr(spec.blocks > 1):
            woven.woven_leave(to(0), before, small, sign)
        if tk.thread_in_warpgroup() == 0:
            found = large * Float32(1.0 / (row_scale(spec.rows) * COLUMN_SCALE)) * up
            g.scales[head] = cutlass.select_(most < INFINITE, found, Float32.inf - Float32.inf)

    @cute.jit
    def load(self, values: cute.Tensor, taps: cute.Tensor, place: Place):
        """values = the thread's taps of a block, as elements of a tile; 0 behind the last one."""
        values.fill(0.0)
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                _, token = self.tokens.where(place, 0, r, half)
                for e in cutlass.range_constexpr(EACH):
                    at = 2 * self.tokens.word(e // 2, r, half) + e % 2
                    if token + e < taps.shape[1]:
                        values[at] = taps[place.head, token + e]

    @cute.jit
    def of_warpgroup(self, most, of_warps: cute.Tensor, barrier):
        """The largest of what a warpgroup's threads have. They meet once, and before `of_warps` is written again."""
        most, warp = cute.arch.warp_redux_sync(most, "max"), tk.thread_in_warpgroup() // 32
        tk.sync(barrier, tk.WARPGROUP)
        if tk.lane_id() == 0:
            of_warps[warp] = most
        tk.sync(barrier, tk.WARPGROUP)
        return cutlass.max(cutlass.max(of_warps[0], of_warps[1]), cutlass.max(of_warps[2], of_warps[3]))
