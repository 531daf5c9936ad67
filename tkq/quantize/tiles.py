"""Float8 tile by tile: scales of 1 x 128, of 128 x 128 or of all, and the transpose in the same pass."""
from dataclasses import dataclass
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cutlass_dsl import T, dsl_user_op

from .. import tile as tk
from ..runtime.compile import fake
from ..tile import vectors
from ..tile.assembly import ptx
from ..tile.float8 import scale_of
from ..utils import WARP
from . import amax as maxima
from .spec import EDGE, VECTOR, TileSpec

SIDE = EDGE // VECTOR  # vectors to a row of a tile, and to a column
THREADS = SIDE * SIDE
WARPS = THREADS // WARP


@dataclass(frozen=True)
class Operands:
    """x, q: (M, N). qt: (N, M). scale: (M, blocks), (row tiles, column tiles), (1,) or (M, 1). scale_t: (N, row blocks)
    or (N, 1), for "1x128" and "row". amax: int32, bits of the largest |x|: (1,) for "tensor", for "row" as
    `RowColScales` has it."""

    x: cute.Tensor
    q: Optional[cute.Tensor]
    scale: Optional[cute.Tensor]
    qt: Optional[cute.Tensor]
    scale_t: Optional[cute.Tensor]
    amax: Optional[cute.Tensor]


class Tilewise:
    """A block takes a tile of 128 x 128; a thread 8 x 8 of it: loads 8 vectors, all before it uses any.

      thread t      rows 8 * (t // 16) ..  columns 8 * (t % 16) ..
      amax          of its part; across the 16 lanes that share rows by shuffles ("1x128"), after which each has that of
                    one row; across the block by shared memory ("128x128"); of columns across 2 lanes by shuffles and
                    the 8 warps by shared memory ("1x128", transposed)
      q             8 bytes a row: 16 lanes write a line of 128
      qt            8 bytes a column, through 16 KB of shared memory: slot (row vector) ^ (column vector) of its line,
                    so that neither way two lanes of a half-warp meet in a bank; 16 lanes then write a line of 128
    """

    def __init__(self, spec: TileSpec):
        self.spec, self.dtype = spec, tk.element_type(spec.out)

    def fake_arguments(self):
        """Compiled for x, q, scale, qt, scale_t, amax; None for what the spec does not have."""
        spec = self.spec
        M, N = fake.sym(), fake.sym()
        unit = VECTOR if spec.wide else 1

        def matrix(dtype, shape, unit):
            size = tk.element_type(dtype).width // 8
            return fake.tensor(dtype, shape, (fake.sym64(divisibility=unit), 1), align=min(16, unit * size))

        def scales(rows, contiguous_rows):
            return fake.tensor("fp32", (rows, fake.sym()), (1, fake.sym64()) if contiguous_rows else None, align=4)

        row, block, tensor = (spec.granularity == name for name in ("row", "1x128", "tensor"))
        x, amax = matrix(spec.x, (M, N), unit), None
        if row or tensor:
            amax = fake.tensor("int32", (fake.sym() if row else 1,), (1,), align=16 if row else 4)
        if spec.step == "amax":
            return x, None, None, None, None, amax
        scale = (fake.tensor("fp32", (1,), (1,), align=4) if tensor
                 else scales(M, True) if row or block else fake.tensor("fp32", (fake.sym(), fake.sym()), align=4))
        return (x, matrix(spec.out, (M, N), unit), scale,
                matrix(spec.out, (N, M), VECTOR if spec.wide_t else 1) if spec.transpose else None,
                scales(N, True) if spec.transpose and (row or block) else None, amax)

    @cute.jit
    def __call__(self, x: cute.Tensor, q: Optional[cute.Tensor], scale: Optional[cute.Tensor],
                 qt: Optional[cute.Tensor], scale_t: Optional[cute.Tensor], amax: Optional[cute.Tensor],
                 stream: cuda.CUstream):
        across = cute.ceil_div(x.shape[1], EDGE)
        self.kernel(Operands(x, q, scale, qt, scale_t, amax), across).launch(
            grid=[across * cute.ceil_div(x.shape[0], EDGE), 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, g: Operands, across: Int32):
        t = cute.arch.thread_idx()[0]
        self.take(g, tk.SharedAllocator(), t, self.tile_of(cute.arch.block_idx()[0], t, across))

    def take(self, g, al, t, tile):
        """A step of a tile, by thread t."""
        self.finish(g, al, t, tile, self.held(g, t, tile))

    def held(self, g, t, tile):
        """x, of thread t."""
        row0, col0 = self.corner(t, tile)
        return [self.load(g.x, row0 + i, col0) for i in range(VECTOR)]

    def corner(self, t, tile):
        return tile[0] * EDGE + t // SIDE * VECTOR, tile[1] * EDGE + t % SIDE * VECTOR

    def finish(self, g, al, t, tile, held):
        """The step, of what is held."""
        spec, (row0, col0) = self.spec, self.corner(t, tile)
        if spec.step == "amax":
            self.find(g, al, t, tile, held)
            return
        inverses = self.row_scales(g, al, t, tile, held, row0)
        for i in range(VECTOR):
            self.store(g.q, [v * inverses[i] for v in vectors.wide(held[i])], row0 + i, col0)
        if spec.transpose:
            inverses = self.column_scales(g, al, t, tile, held, col0, inverses)
            x = [vectors.wide(_copied(row)) for row in held]
            self.transpose(g, al, t, tile, x, inverses)

    def tile_of(self, block, t, across):
        """(row of tiles, column of tiles) of a block's thread t. What a tile is, `corner` says."""
        return block // across, block % across

    # ---- scales ------------------------------------------------------------------------------------

    def find(self, g, al, t, tile, held):
        """What is to be known of all of x before a tile can be written."""
        self.put_amax(g.amax, self.of_block(al, t, maxima.of_all(held)), t)

    def row_scales(self, g, al, t, tile, held, row0):
        """One over the scale of each of this thread's rows. Scales are written where they belong."""
        if self.spec.granularity == "1x128":
            one = self.scale_of(maxima.of_shared_rows(held, t, SIDE))  # of row t % VECTOR of them
            row = row0 + t % VECTOR
            self.put(g.scale, (row, tile[1]), one, (t % SIDE < VECTOR) & (row < g.scale.shape[0]))
            inverse, first = _inverse(one), t % WARP // SIDE * SIDE
            return [cute.arch.shuffle_sync(inverse, first + i) for i in range(VECTOR)]
        if self.spec.granularity == "128x128":
            one = self.scale_of(self.of_block(al, t, maxima.of_all(held)))
            self.put(g.scale, (tile[0], tile[1]), one, t == 0)
        else:
            one = self.scale_of(Int32(g.amax[0]).bitcast(Float32))
            self.put(g.scale, (0,), one, (t == 0) & (tile[0] + tile[1] == 0))
        return [_inverse(one)] * VECTOR

    def column_scales(self, g, al, t, tile, held, col0, inverses):
        """One over the scale of each of this thread's columns. Scales are written where they belong."""
        if self.spec.granularity != "1x128":
            return inverses
        met = self.columns_of_warps(al, t, held)
        cute.arch.sync_threads()
        warps = [_loaded(met, t % SIDE * VECTOR, w) for w in range(WARPS)]
        scales = [self.scale_of(v) for v in maxima.magnitudes(maxima.of_columns(warps))]
        self.put_scales(g.scale_t, scales, col0, tile[0], t // SIDE)
        return [_inverse(scale) for scale in scales]

    def columns_of_warps(self, al, t, held):
        """(EDGE, WARPS): the largest of each column, with some sign, in the rows of each warp."""
        met = al.vector(EDGE, WARPS, held[0].element_type)
        self.put_lanes(met, maxima.across_lanes(maxima.of_columns(held), SIDE), t)
        return met

    def scale_of(self, amax):
        return scale_of(amax, self.spec.out)

    def of_block(self, al, t, value):
        """The largest of a value a thread, in all of them."""
        value = maxima.of_lanes(value, (1, 2, 4, 8, 16))
        met = al.vector(WARPS)
        self.put_warp(met, value, t)
        cute.arch.sync_threads()
        return maxima.largest([met[w, 0] for w in range(WARPS)])

    @cute.jit
    def put_warp(self, met: cute.Tensor, value: Float32, t: Int32):
        if t % WARP == 0:
            met[t // WARP, 0] = value

    @cute.jit
    def put_lanes(self, met: cute.Tensor, held: cute.Tensor, t: Int32):
        if t % WARP < SIDE:
            cute.autovec_copy(held, vectors.run_at(met, (t % SIDE * VECTOR, t // WARP), VECTOR))

    @cute.jit
    def put(self, m: cute.Tensor, coord, value: Float32, mine):
        if mine:
            m[coord] = value

    @cute.jit
    def put_amax(self, amax: cute.Tensor, value: Float32, t: Int32):
        if t == 0:
            _red_max(amax.iterator.toint(), value.bitcast(Uint32))

    @cute.jit
    def put_scales(self, m: cute.Tensor, scales: Constexpr, first, column, lane):
        """m[first + i, column] = scales[i], by the first lane of those that share them."""
        if lane == 0:
            for i in cutlass.range_constexpr(VECTOR):
                if first + i < m.shape[0]:
                    m[first + i, column] = scales[i]

    # ---- in and out ----------------------------------------------------------------------------------

    def load(self, m, row, col):
        """VECTOR neighbours of a row. Past the end a whole one is the last one, which is of the same tile and changes
        no maximum (or of a piece that is all past the end, of which nothing is written), and no branch keeps a load
        from flying with others; elements by themselves are zeros there."""
        if self.spec.wide:
            row, col = cutlass.min(row, m.shape[0] - 1), cutlass.min(col, m.shape[1] - VECTOR)
            return vectors.load(vectors.run_at(m, (row, col), VECTOR))
        return self.load_elements(m, row, col)

    @cute.jit
    def load_elements(self, m: cute.Tensor, row, col):
        held = cute.make_rmem_tensor(VECTOR, m.element_type)
        held.fill(0)
        if row < m.shape[0]:
            for j in cutlass.range_constexpr(VECTOR):
                if col + j < m.shape[1]:
                    held[j] = m[row, col + j]
        return held

    @cute.jit
    def store(self, m: cute.Tensor, values: Constexpr, row, col):
        """m[row, col ..] = values, rounded, inside m."""
        if row < m.shape[0]:
            self.put_run(m, vectors.packed(values, self.dtype), row, col, self.spec.wide)

    @cute.jit
    def put_run(self, m: cute.Tensor, packed: cute.Tensor, row, col, wide: Constexpr[bool]):
        if const_expr(wide):
            if col < m.shape[1]:
                vectors.store(packed, vectors.run_at(m, (row, col), VECTOR))
        else:
            bytes, to = cute.recast_tensor(packed, cutlass.Uint8), cute.recast_tensor(m, cutlass.Uint8)
            for j in cutlass.range_constexpr(VECTOR):
                if col + j < m.shape[1]:
                    to[row, col + j] = bytes[j]

    @cute.jit
    def transpose(self, g, al: Constexpr, t, tile, x: Constexpr, inverses: Constexpr):
        """qt's part of the tile. The layout of shared memory: (column, slot), 8 bytes each."""
        met = al.allocate_tensor(Int64, cute.make_layout((EDGE, SIDE), stride=(SIDE, 1)), byte_alignment=128)
        down, right = t // SIDE, t % SIDE
        for j in cutlass.range_constexpr(VECTOR):
            packed = vectors.packed([row[j] * inverses[j] for row in x], self.dtype)
            met[right * VECTOR + j, down ^ right] = cute.recast_tensor(packed, Int64)[0]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(VECTOR):
            column = t // SIDE + i * SIDE  # sixteen threads take one, a vector of its rows each
            packed = cute.make_rmem_tensor(VECTOR, self.dtype)
            cute.recast_tensor(packed, Int64)[0] = met[column, t % SIDE ^ (column // VECTOR)]
            if tile[1] * EDGE + column < g.qt.shape[0]:
                self.put_run(g.qt, packed, tile[1] * EDGE + column,
                             tile[0] * EDGE + t % SIDE * VECTOR, self.spec.wide_t)


def _inverse(scale):
    return cute.arch.rcp_approx(scale)


def _loaded(met, column, warp):
    held = cute.make_rmem_tensor(VECTOR, met.element_type)
    cute.autovec_copy(vectors.run_at(met, (column, warp), VECTOR), held)
    return held


def _copied(held):
    """The same elements, of which the compiler knows nothing: what it made of them need not be held."""
    found = cute.make_rmem_tensor(cute.size(held), held.element_type)
    words, new = cute.recast_tensor(held, Uint32), cute.recast_tensor(found, Uint32)
    for i in range(cute.size(words)):
        new[i] = _same(words[i])
    return found


@dsl_user_op
def _same(word, *, loc=None, ip=None):
    return Uint32(ptx([Uint32(word)], "mov.b32 $0, $1;", "=r,r", loc, ip, T.i32()))


@dsl_user_op
def _red_max(address, bits, *, loc=None, ip=None):
    """The larger of two unsigned words stays at the global address: of positive floats' bits, NaN the largest."""
    ptx([Int64(address), Uint32(bits)], "red.relaxed.gpu.global.max.u32 [$0], $1;", "l,r", loc, ip)
