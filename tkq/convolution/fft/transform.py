"""A tile's transforms: forth to the spectrum, back from it, in wgmma products and factors between them."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, const_expr

import tkq.tile as tk
from tkq.convolution.fft.spec import COLS, ROWS


class Factors(NamedTuple):
    """A block's: from the left (`Tables.fill_rows`), from the right, between the two."""

    rows: tk.SharedTile
    columns: tk.SharedPair
    twiddles: cute.Tensor


TILE = tk.st(ROWS, COLS, Float16)  # of factors and operands


class Transform:
    """Of a spec. A warpgroup calls each function together."""

    def __init__(self, spec):
        self.spec = spec

    @cute.jit
    def forth(self, spectrum: tk.Pair, narrow: tk.Pair, inputs: tk.SharedTile, f: Factors):
        """spectrum = the transform of the tiles in shared memory; narrow: registers in between."""
        for tile in cutlass.range_constexpr(self.spec.tiles):
            product = tk.mma_AB if const_expr(tile) else tk.mm_AB
            product(spectrum.real, f.rows[2 * tile], inputs[tile])
            product(spectrum.imag, f.rows[2 * tile + 1], inputs[tile])
        tk.mma_wait()
        tk.complex_mul_powers(narrow, spectrum, f.twiddles)
        tk.complex_mm_AB(spectrum, narrow, f.columns)
        tk.mma_wait()

    @cute.jit
    def back(self, between: tk.Pair, narrow: tk.Pair, tiles: tk.SharedTile, f: Factors, barrier):
        """The output tiles of narrow, the conjugate of a spectrum, are in `between`: of causal ones the real part.
        tiles: two, in shared memory, of which the warpgroup's threads have no more need. barrier: a named one."""
        tk.complex_mm_AB(between, narrow, f.columns)
        tk.mma_wait()
        tk.complex_mul_powers(narrow, between, f.twiddles, conjugate=True)
        tk.sync(barrier, tk.WARPGROUP)  # all have read what was in the tiles
        tk.store(tiles[0], narrow.real)
        tk.store(tiles[1], narrow.imag)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        for tile in cutlass.range_constexpr(self.spec.tiles):
            to = between.imag if const_expr(tile) else between.real
            tk.mm_AtB(to, f.rows[2 * tile], tiles[0])
            tk.mma_AtB(to, f.rows[2 * tile + 1], tiles[1])
        tk.mma_wait()
