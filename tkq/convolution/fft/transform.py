"""A tile's transforms: forth to the spectrum, back from it, in wgmma products and factors between them."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, const_expr

import tkq.tile as tk
from tkq.convolution.fft.spec import COLS, ROWS


class Factors(NamedTuple):
    """A block's: from the left (`Tables.fill_rows`), from the right (a `tkq.tile.SharedPair`, or split), between the
    two."""

    rows: tk.SharedTile
    columns: Any
    twiddles: cute.Tensor


TILE = tk.st(ROWS, COLS, Float16)  # of factors and operands


class Transform:
    """Of a spec. A warpgroup calls each function together.

    Split, an operand is the sum of two: tiles of high parts, then as many of low parts, and a product is three. Small
    ones come first, as a sum is rounded to the size that it has so far."""

    def __init__(self, spec):
        self.spec = spec

    @property
    def parts(self) -> int:
        """Of an operand."""
        return 2 if self.spec.split else 1

    def narrow(self, cols=COLS):
        """Registers for an operand, as products take it from there."""
        return tk.split_pair(cols) if self.spec.split else tk.pair(cols, Float16)

    def left_factors(self, al):
        """A block's factors from the left in shared memory, not filled."""
        return al.tile(TILE, 2 * self.spec.tiles * self.parts)

    def factors(self, al):
        """A block's factors from the left and from the right, likewise."""
        rows, columns = self.left_factors(al), al.tile(TILE, 3 * self.parts)
        pairs = [tk.SharedPair(*[columns[3 * part + i] for i in range(3)]) for part in range(self.parts)]
        return rows, tk.SplitSharedPair(*pairs) if self.spec.split else pairs[0]

    def terms(self):
        """Products that make one: (first tile of the factors, first tile of the operand)."""
        return ((0, 2), (2 * self.spec.tiles, 0), (0, 0)) if self.spec.split else ((0, 0),)

    def put(self, tiles, narrow):
        """The tiles of an operand = what is in registers."""
        pairs = (narrow.high, narrow.low) if self.spec.split else (narrow,)
        for part, of in enumerate(pairs):
            tk.store(tiles[2 * part], of.real)
            tk.store(tiles[2 * part + 1], of.imag)

    @cute.jit
    def forth(self, spectrum: tk.Pair, narrow, inputs, f: Factors):
        """spectrum = the transform of the tiles in shared memory; narrow: registers in between."""
        self.left(spectrum, f.rows, inputs)
        tk.mma_wait()
        tk.complex_mul_powers(narrow, spectrum, f.twiddles)
        tk.complex_mm_AB(spectrum, narrow, f.columns)
        tk.mma_wait()

    @cute.jit
    def back(self, between: tk.Pair, narrow, tiles, f: Factors, barrier):
        """The output tiles of narrow, the conjugate of a spectrum, are in `between`: of causal ones the real part.
        tiles: two (split, four), in shared memory, of which the warpgroup's threads have no more need. barrier: a
        named one."""
        tk.complex_mm_AB(between, narrow, f.columns)
        tk.mma_wait()
        tk.complex_mul_powers(narrow, between, f.twiddles, conjugate=True)
        tk.sync(barrier, tk.WARPGROUP)  # all have read what was in the tiles
        self.put(tiles, narrow)
        tk.publish()
        tk.sync(barrier, tk.WARPGROUP)
        for tile in cutlass.range_constexpr(self.spec.tiles):
            to = between.imag if const_expr(tile) else between.real
            self.left_back(to, f.rows, tiles, tile)
        tk.mma_wait()

    def left(self, d: tk.Pair, factors, inputs):
        """d = the product with factors from the left of an operand's tiles."""
        for n, (rows, first) in enumerate(self.terms()):
            for tile in range(self.spec.tiles):
                product = tk.mma_AB if tile or n else tk.mm_AB
                product(d.real, factors[rows + 2 * tile], inputs[first + tile])
                product(d.imag, factors[rows + 2 * tile + 1], inputs[first + tile])

    def left_back(self, d: tk.RegTile, factors, tiles, tile):
        """d = an output tile of the product from the left, back."""
        for n, (rows, first) in enumerate(self.terms()):
            product = tk.mma_AtB if n else tk.mm_AtB
            product(d, factors[rows + 2 * tile], tiles[first])
            tk.mma_AtB(d, factors[rows + 2 * tile + 1], tiles[first + 1])
