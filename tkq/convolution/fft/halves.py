"""A tile's transforms, as in `Transform`, but that those of 64 columns are two of 32 (`tkq.tile.woven`): half the
products from the right. Operands are fp16, not split."""
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.spec import ROWS
from tkq.convolution.fft.transform import TILE, Factors
from tkq.tile import warp_products, woven


class Halves:
    """Of a spec. A warpgroup calls each function together.

    Columns of tiles are in the order of `tables.token_of`. With a bf16 result factors between products and the filter's
    spectrum are fp16, and so are their products; with an fp16 one they are fp32."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = Float32 if spec.exact else Float16
        self.by_warps = spec.rows <= 16  # which a warp has

    def factors(self, al) -> Factors:
        """A block's factors in shared memory, not filled."""
        return Factors(al.tile(TILE, 2), al.tile(TILE, 2),
                       al.allocate_tensor(self.dtype, woven.woven_factors(self.dtype), 16))

    def spectra(self, al, parts: int = 1):
        """Room for spectra, likewise."""
        return al.allocate_tensor(self.dtype, woven.woven_factors(self.dtype, parts), 16)

    def fill(self, f: Factors, tables, me):
        """A block's factors, by its `Tables`; its threads together, which meet behind."""
        fill = tables.fill_halved_rows if self.spec.halved_rows else tables.fill_rows
        fill(f.rows, me, 16 if self.by_warps else ROWS)
        tables.fill_halves(f.columns, me)
        tables.fill_all_twiddles(f.twiddles)

    @cute.jit
    def put(self, tiles, narrow: tk.Pair):
        """The tiles that `forth` takes = a tile's numbers, narrow, or those of two; `written` behind."""
        if const_expr(self.spec.halved_rows):
            woven.fold_rows(narrow)
        for to, of in zip(tiles, (narrow.real, narrow.imag)):
            tk.store(to, of)

    @cute.jit
    def forth(self, spectrum: tk.Pair, narrow: tk.Pair, tiles, f: Factors):
        """spectrum, woven, = the transform of the tiles in shared memory; narrow: registers in between, fp16. Its first
        half is there after ``mma_wait(1)``, its second one after ``mma_wait``."""
        if const_expr(self.by_warps):
            self.left_of_warps(spectrum, tiles, f)
        else:
            tk.mm_AB(spectrum.real, f.rows[0], tiles[0])
            tk.mm_AB(spectrum.imag, f.rows[1], tiles[-1])
            tk.mma_wait()
        woven.weave(narrow, spectrum, f.twiddles, self.spec.halved_rows)
        tk.mm_AB(spectrum.real, narrow.real, f.columns[0])
        tk.mm_AB(spectrum.imag, narrow.imag, f.columns[1])

    def left_of_warps(self, d: tk.Pair, tiles, f: Factors):
        """The first product, of each warp its own transforms."""
        p, q = (warp_products.diagonal_block(f.rows[i]) for i in range(2))
        if self.spec.halved_rows:
            warp_products.diagonal_mm([(d.real, p, False)], tiles[0])
            warp_products.diagonal_mm([(d.imag, q, False)], tiles[1])
        else:
            warp_products.diagonal_mm([(d.real, p, False), (d.imag, q, False)], tiles[0])

    def written(self):
        """What threads have put into tiles is there for products after `meet`; what a warp has for itself, at once."""
        if self.by_warps:
            cute.arch.sync_warp()
        else:
            tk.publish()

    def meet(self, barrier):
        """A warpgroup whose warps share tiles meets, by a named barrier."""
        if not self.by_warps:
            tk.sync(barrier, tk.WARPGROUP)

    @cute.jit
    def half_back(self, between: tk.Pair, narrow: tk.Pair, f: Factors, part: cutlass.Constexpr):
        """The inverse transform of a half of a woven spectrum, narrow, fp16; it is there after ``mma_wait``."""
        if const_expr(part):
            tk.mm_ABt(between.imag, narrow.imag, f.columns[1])
        else:
            tk.mm_ABt(between.real, narrow.real, f.columns[0])

    @cute.jit
    def back(self, between: tk.Pair, narrow: tk.Pair, tiles, f: Factors):
        """What a product from the left makes the output tiles of, of the halves that are back, in two tiles in shared
        memory, which nobody reads; narrow: registers in between, fp16. Those that share tiles `meet` behind."""
        woven.unweave(narrow, between, f.twiddles, self.spec.halved_rows)
        tk.store(tiles[0], narrow.real)
        tk.store(tiles[1], narrow.imag)
        self.written()

    @cute.jit
    def left_back(self, outputs: tk.Pair, tiles, f: Factors):
        """The output tiles: of causal ones the real part."""
        if const_expr(self.by_warps):
            self.left_back_of_warps(outputs, tiles, f)
        else:
            second = tk.mm_AtB if self.spec.halved_rows else tk.mma_AtB
            tk.mm_AtB(outputs.real, f.rows[0], tiles[0])
            second(outputs.imag if self.spec.halved_rows else outputs.real, f.rows[1], tiles[1])
            tk.mma_wait()
        if const_expr(self.spec.halved_rows):
            woven.unfold_rows(outputs)

    def left_back_of_warps(self, outputs: tk.Pair, tiles, f: Factors):
        p, q = (warp_products.diagonal_block(f.rows[i], transposed=True) for i in range(2))
        halved = self.spec.halved_rows
        warp_products.diagonal_mm([(outputs.real, p, False)], tiles[0])
        warp_products.diagonal_mm([(outputs.imag if halved else outputs.real, q, not halved)], tiles[1])
