"""Float8 of x by rows, and of x.t() by its own rows: whatever is written needs all of x first."""
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from .. import tile as tk
from ..tile import vectors
from . import amax as maxima
from .spec import EDGE, VECTOR
from .tiles import SIDE, WARPS, Tilewise, _inverse, _red_max


class RowColScales(Tilewise):
    """Two launches, each of which reads x; a tile's blocks and threads as in `Tilewise`.

      "amax"      of a tile's rows across 16 lanes by shuffles, of its columns across 2 lanes and the 8 warps; each row
                  and column is added to what all tiles have found, in global memory, by one thread
      "quantise"  the tiles from the last to the first: of what was read last, much is in L2 still

    amax: the rows' first, then the columns', each padded to whole tiles, all zeros before: elements past the end are
    found and read, and mean nothing.
    """

    def tile_of(self, block, t, across):
        if const_expr(self.spec.step == "quantise"):
            block = cute.arch.grid_dim()[0] - 1 - block
        return block // across, block % across

    def find(self, g, al, t, tile, held):
        """The tile's part of amax."""
        self.add(g.amax, tile[0] * EDGE + t // SIDE * VECTOR + t % VECTOR, maxima.of_shared_rows(held, t, SIDE),
                 t % SIDE < VECTOR)
        if self.spec.transpose:
            met = self.columns_of_warps(al, t, held)
            tk.sync_block()
            self.add_columns(g.amax, self.first_column(g) + tile[1] * EDGE, met, t)

    @cute.jit
    def add_columns(self, amax: cute.Tensor, first, met: cute.Tensor, t: Int32):
        if t < EDGE:
            self.add(amax, first + t, maxima.largest([met[t, w].to(Float32) for w in range(WARPS)]), True)

    @cute.jit
    def add(self, amax: cute.Tensor, at, value: Float32, mine):
        if mine:
            _red_max(vectors.run_at(amax, (at,), 1).iterator.toint(), value.bitcast(Uint32))

    def first_column(self, g):
        return cute.ceil_div(g.x.shape[0], EDGE) * EDGE

    def row_scales(self, g, al, t, tile, held, row0):
        return self.scales(g.amax, row0, g.scale, row0, t % SIDE + tile[1])

    def column_scales(self, g, al, t, tile, held, col0, inverses):
        return self.scales(g.amax, self.first_column(g) + col0, g.scale_t, col0, t // SIDE + tile[0])

    def scales(self, amax, at, to, first, lane):
        """One over those of the eight from amax[at] on; lane 0 of all that have them writes them to to[first] on."""
        found = vectors.load(vectors.run_at(amax, (at,), VECTOR))
        scales = [self.scale_of(Int32(found[i]).bitcast(Float32)) for i in range(VECTOR)]
        self.put_scales(to, scales, first, 0, lane)
        return [_inverse(scale) for scale in scales]
