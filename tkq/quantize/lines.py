"""Float8 of x by rows, and of x.t() by its own rows: whatever is written needs all of x first."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Uint32, const_expr

from ..pointwise import access
from .spec import EDGE, VECTOR, TileSpec
from .tiles import SIDE, WARPS, Tiles, _lanes_max, _largest, _largest_of, _largest_of_columns, _red_max, operands


class Lines(Tiles):
    """Two launches, each of which reads x; a tile's blocks and threads as in `Tiles`.

      "amax"      of a tile's rows across 16 lanes by shuffles, of its columns across 2 lanes and the 8 warps; thread t
                  then adds row t, or column t - 128, to what all tiles have found, in global memory
      "quantise"  the tiles from the last to the first: of what was read last, much is in L2 still

    amax: the rows' first, then the columns', each padded to whole tiles, all zeros before: elements past the end are
    found and read, and mean nothing.
    """

    def tile_of(self, block, across):
        if const_expr(self.spec.step == "quantise"):
            block = cute.arch.grid_dim()[0] - 1 - block
        return block // across, block % across

    def find(self, g, al, t, tile, held):
        """The tile's part of amax."""
        of_rows, of_columns = al.vector(EDGE), None
        self.put_rows(of_rows, [_lanes_max(_largest_of([row]), (1, 2, 4, 8)) for row in held], t)
        if const_expr(self.spec.transpose):
            of_columns = al.vector(EDGE, WARPS)
            self.put_lanes(of_columns, [_lanes_max(v, (16,)) for v in _largest_of_columns(held)], t)
        cute.arch.sync_threads()
        self.add(g, of_rows, of_columns, t, tile)

    @cute.jit
    def put_rows(self, met: cute.Tensor, values: Constexpr, t: Int32):
        if t % SIDE == 0:
            for i in cutlass.range_constexpr(VECTOR):
                met[t // SIDE * VECTOR + i, 0] = values[i]

    @cute.jit
    def add(self, g: Constexpr, of_rows: cute.Tensor, of_columns, t: Int32, tile: Constexpr):
        if t < EDGE:
            _put(g.amax, tile[0] * EDGE + t, of_rows[t, 0])
        elif const_expr(self.spec.transpose):
            column = t - EDGE
            _put(g.amax, self.first_column(g) + tile[1] * EDGE + column,
                 _largest([of_columns[column, w] for w in range(WARPS)]))

    def first_column(self, g):
        return cute.ceil_div(g.x.shape[0], EDGE) * EDGE

    def row_scales(self, g, al, t, tile, held, row0):
        return self.scales(g.amax, row0, g.scale, row0, t % SIDE + tile[1])

    def column_scales(self, g, al, t, tile, held, col0, scales):
        return self.scales(g.amax, self.first_column(g) + col0, g.scale_t, col0, t // SIDE + tile[0])

    def scales(self, amax, at, to, first, lane):
        """Of the eight from amax[at] on; lane 0 of all that have them writes them to to[first] on."""
        found = access.load(access.run_at(amax, (at,), VECTOR))
        scales = [self.scale_of(Int32(found[i]).bitcast(Float32)) for i in range(VECTOR)]
        self.put_scales(to, scales, first, 0, lane)
        return scales


def _put(amax, at, value):
    _red_max(access.run_at(amax, (at,), 1).iterator.toint(), value.bitcast(Uint32))


def build(spec: TileSpec):
    """(kernel, fake arguments)."""
    return Lines(spec), operands(spec)
