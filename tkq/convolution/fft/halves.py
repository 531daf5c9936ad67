"""A tile's transforms, as in `Transform`, but that those of 64 columns are two of 32 (`tkq.tile.woven`): half the
products from the right. Operands are fp16, not split."""
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, const_expr

import tkq.tile as tk
from tkq.convolution.fft.transform import TILE, Factors
from tkq.tile import woven


class Halves:
    """Of a spec. A warpgroup calls each function together.

    Columns of tiles are in the order of `tokens.token_of`. With a bf16 result factors between products and the filter's
    spectrum are fp16, and so are their products; with an fp16 one they are fp32."""

    def __init__(self, spec):
        self.spec = spec
        self.dtype = Float32 if spec.exact else Float16

    def factors(self, al) -> Factors:
        """A block's factors in shared memory, not filled."""
        return Factors(al.tile(TILE, 2 * self.spec.tiles), al.tile(TILE, 2),
                       al.allocate_tensor(self.dtype, woven.woven_factors(self.dtype), 16))

    def spectra(self, al, parts: int = 1):
        """Room for those of the filter's parts, likewise."""
        return al.allocate_tensor(self.dtype, woven.woven_factors(self.dtype, parts), 16)

    def fill(self, f: Factors, tables, me):
        """A block's factors, by its `Tables`; its threads together, which meet behind."""
        tables.fill_rows(f.rows, me)
        tables.fill_halves(f.columns, me)
        tables.fill_all_twiddles(f.twiddles)

    @cute.jit
    def forth(self, spectrum: tk.Pair, narrow: tk.Pair, tiles, f: Factors):
        """spectrum, woven, = the transform of the tiles in shared memory; narrow: registers in between, fp16. Its first
        half is there after ``mma_wait(1)``, its second one after ``mma_wait``."""
        for tile in cutlass.range_constexpr(self.spec.tiles):
            product = tk.mma_AB if tile else tk.mm_AB
            product(spectrum.real, f.rows[2 * tile], tiles[tile])
            product(spectrum.imag, f.rows[2 * tile + 1], tiles[tile])
        tk.mma_wait()
        woven.weave(narrow, spectrum, f.twiddles)
        tk.mm_AB(spectrum.real, narrow.real, f.columns[0])
        tk.mm_AB(spectrum.imag, narrow.imag, f.columns[1])

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
        memory, which nobody reads; narrow: registers in between, fp16. The warpgroup's threads meet behind."""
        woven.unweave(narrow, between, f.twiddles)
        tk.store(tiles[0], narrow.real)
        tk.store(tiles[1], narrow.imag)
        tk.publish()

    @cute.jit
    def left_back(self, outputs: tk.Pair, tiles, f: Factors):
        """The output tiles: of causal ones the real part. They are there after ``mma_wait``."""
        for tile in cutlass.range_constexpr(self.spec.tiles):
            to = outputs.imag if const_expr(tile) else outputs.real
            tk.mm_AtB(to, f.rows[2 * tile], tiles[0])
            tk.mma_AtB(to, f.rows[2 * tile + 1], tiles[1])
