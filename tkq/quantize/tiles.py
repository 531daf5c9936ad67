"""Float8 tile by tile: scales of 1 x 128, of 128 x 128 or of all, and the transpose in the same pass."""
from dataclasses import dataclass
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, Uint32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .. import tile as tk
from ..norms.quant import nan_max, scale_of
from ..pointwise import access
from ..tile.bulk import _asm
from ..utils import WARP
from .spec import EDGE, VECTOR, TileSpec

SIDE = EDGE // VECTOR  # vectors to a row of a tile, and to a column
THREADS = SIDE * SIDE
WARPS = THREADS // WARP


@dataclass(frozen=True)
class Operands:
    """x, q: (M, N). qt: (N, M). scale: (M, blocks), (row tiles, column tiles), (1,) or (M, 1). scale_t: (N, row blocks)
    or (N, 1), for "block" and "row". amax: int32, bits of the largest |x|: (1,) for "tensor", `Lines`' for "row"."""

    x: cute.Tensor
    q: Optional[cute.Tensor]
    scale: Optional[cute.Tensor]
    qt: Optional[cute.Tensor]
    scale_t: Optional[cute.Tensor]
    amax: Optional[cute.Tensor]


class Tiles:
    """A block takes a tile of 128 x 128; a thread 8 x 8 of it: loads 8 vectors, all before it uses any.

      thread t      rows 8 * (t // 16) ..  columns 8 * (t % 16) ..
      amax          of its part; across the 16 lanes that share rows by shuffles ("block"), across the block by shared
                    memory ("tile"); of columns across 2 lanes and the 8 warps ("block", transposed)
      q             8 bytes a row: 16 lanes write a line of 128
      qt            8 bytes a column, through 16 KB of shared memory: slot (row vector) ^ (column vector) of its line,
                    so that neither way two lanes of a half-warp meet in a bank; 16 lanes then write a line of 128
    """

    def __init__(self, spec: TileSpec):
        self.spec, self.dtype = spec, tk.element_type(spec.out)

    @cute.jit
    def __call__(self, x: cute.Tensor, q: Optional[cute.Tensor], scale: Optional[cute.Tensor],
                 qt: Optional[cute.Tensor], scale_t: Optional[cute.Tensor], amax: Optional[cute.Tensor],
                 stream: cuda.CUstream):
        across = cute.ceil_div(x.shape[1], EDGE)
        self.kernel(Operands(x, q, scale, qt, scale_t, amax), across).launch(
            grid=[across * cute.ceil_div(x.shape[0], EDGE), 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, g: Operands, across: Int32):
        tile = self.tile_of(cute.arch.block_idx()[0], across)
        self.take(g, tk.SharedAllocator(), cute.arch.thread_idx()[0], tile)

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
        scales = self.row_scales(g, al, t, tile, held, row0)
        for i in range(VECTOR):
            inverse = cute.arch.rcp_approx(scales[i])
            self.store(g.q, [v * inverse for v in access.wide(held[i])], row0 + i, col0)
        if spec.transpose:
            scales = self.column_scales(g, al, t, tile, held, col0, scales)
            x = [access.wide(_anew(row)) for row in held]
            self.transpose(g, al, t, tile, x, scales)

    def tile_of(self, block, across):
        """(row of tiles, column of tiles) of a block."""
        return block // across, block % across

    # ---- scales ------------------------------------------------------------------------------------

    def find(self, g, al, t, tile, held):
        """What is to be known of all of x before a tile can be written."""
        self.put_amax(g.amax, self.of_block(al, t, _largest_of(held)), t)

    def row_scales(self, g, al, t, tile, held, row0):
        """The scale of each of this thread's rows, written where they belong."""
        if self.spec.granularity == "block":
            scales = [self.scale_of(_lanes_max(_largest_of([row]), (1, 2, 4, 8))) for row in held]
            self.put_scales(g.scale, scales, row0, tile[1], t % SIDE)
            return scales
        if self.spec.granularity == "tile":
            one = self.scale_of(self.of_block(al, t, _largest_of(held)))
            self.put(g.scale, (tile[0], tile[1]), one, t == 0)
        else:
            one = self.scale_of(Int32(g.amax[0]).bitcast(Float32))
            self.put(g.scale, (0,), one, (t == 0) & (cute.arch.block_idx()[0] == 0))
        return [one] * VECTOR

    def column_scales(self, g, al, t, tile, held, col0, scales):
        """The scale of each of this thread's columns, written where they belong."""
        if self.spec.granularity != "block":
            return scales
        met = al.vector(EDGE, WARPS)
        self.put_lanes(met, [_lanes_max(v, (16,)) for v in _largest_of_columns(held)], t)
        cute.arch.sync_threads()
        found = []
        for j in range(VECTOR):
            found.append(self.scale_of(_largest([met[t % SIDE * VECTOR + j, w] for w in range(WARPS)])))
        self.put_scales(g.scale_t, found, col0, tile[0], t // SIDE)
        return found

    def scale_of(self, amax):
        return scale_of(amax, self.spec.out)

    def of_block(self, al, t, value):
        """The largest of a value a thread, in all of them."""
        value = _lanes_max(value, (1, 2, 4, 8, 16))
        met = al.vector(WARPS)
        self.put_warp(met, value, t)
        cute.arch.sync_threads()
        return _largest([met[w, 0] for w in range(WARPS)])

    @cute.jit
    def put_warp(self, met: cute.Tensor, value: Float32, t: Int32):
        if t % WARP == 0:
            met[t // WARP, 0] = value

    @cute.jit
    def put_lanes(self, met: cute.Tensor, values: Constexpr, t: Int32):
        if t % WARP < SIDE:
            for j in cutlass.range_constexpr(VECTOR):
                met[t % SIDE * VECTOR + j, t // WARP] = values[j]

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
        no maximum, and no branch keeps a load from flying with others; elements by themselves are zeros there."""
        if self.spec.wide:
            row, col = cutlass.min(row, m.shape[0] - 1), cutlass.min(col, m.shape[1] - VECTOR)
            return access.load(access.run_at(m, (row, col), VECTOR), once=True)
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
            self.put_run(m, access.packed(values, self.dtype), row, col, self.spec.wide)

    @cute.jit
    def put_run(self, m: cute.Tensor, packed: cute.Tensor, row, col, wide: Constexpr[bool]):
        if const_expr(wide):
            if col < m.shape[1]:
                access.store(packed, access.run_at(m, (row, col), VECTOR), once=True)
        else:
            bytes, to = cute.recast_tensor(packed, cutlass.Uint8), cute.recast_tensor(m, cutlass.Uint8)
            for j in cutlass.range_constexpr(VECTOR):
                if col + j < m.shape[1]:
                    to[row, col + j] = bytes[j]

    @cute.jit
    def transpose(self, g, al: Constexpr, t, tile, x: Constexpr, scales: Constexpr):
        """qt's part of the tile. The layout of shared memory: (column, slot), 8 bytes each."""
        met = al.allocate_tensor(Int64, cute.make_layout((EDGE, SIDE), stride=(SIDE, 1)), byte_alignment=128)
        down, right = t // SIDE, t % SIDE
        for j in cutlass.range_constexpr(VECTOR):
            inverse = cute.arch.rcp_approx(scales[j])
            packed = access.packed([row[j] * inverse for row in x], self.dtype)
            met[right * VECTOR + j, down ^ right] = cute.recast_tensor(packed, Int64)[0]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(VECTOR):
            column = t // SIDE + i * SIDE  # sixteen threads take one, a vector of its rows each
            packed = cute.make_rmem_tensor(VECTOR, self.dtype)
            cute.recast_tensor(packed, Int64)[0] = met[column, t % SIDE ^ (column // VECTOR)]
            if tile[1] * EDGE + column < g.qt.shape[0]:
                self.put_run(g.qt, packed, tile[1] * EDGE + column,
                             tile[0] * EDGE + t % SIDE * VECTOR, self.spec.wide_t)


def _largest_of(rows):
    """max |v| of register tensors; NaN where one is. Of 16 bits two at a time, and one conversion in the end."""
    dtype = rows[0].element_type
    if dtype.width != 16:
        return _largest([v for row in rows for v in access.wide(row)])
    pairs = [word[i] for word in (cute.recast_tensor(row, Uint32) for row in rows) for i in range(cute.size(word))]
    both = cute.make_rmem_tensor(2, dtype)
    cute.recast_tensor(both, Uint32)[0] = _larger_of(pairs, dtype)
    return _largest(access.wide(both))


def _largest_of_columns(rows):
    """The largest |v| of each column of register tensors; NaN where one is."""
    dtype = rows[0].element_type
    if dtype.width != 16:
        held = [access.wide(row) for row in rows]
        return [_largest([row[j] for row in held]) for j in range(VECTOR)]
    words = [cute.recast_tensor(row, Uint32) for row in rows]
    both = cute.make_rmem_tensor(VECTOR, dtype)
    for i in range(cute.size(words[0])):
        cute.recast_tensor(both, Uint32)[i] = _larger_of([word[i] for word in words], dtype)
    return [_largest([v]) for v in access.wide(both)]


def _larger_of(pairs, dtype):
    """The largest magnitudes of pairs of 16-bit elements, with some sign; NaN where one is."""
    found = pairs[0]
    for pair in pairs[1:]:
        found = _larger_pair(found, pair, "bf16x2" if dtype is cutlass.BFloat16 else "f16x2")
    return found


def _anew(held):
    """The same elements, of which the compiler knows nothing: what it made of them need not be kept."""
    found = cute.make_rmem_tensor(cute.size(held), held.element_type)
    words, new = cute.recast_tensor(held, Uint32), cute.recast_tensor(found, Uint32)
    for i in range(cute.size(words)):
        new[i] = _same(words[i])
    return found


@dsl_user_op
def _same(word, *, loc=None, ip=None):
    return Uint32(llvm.inline_asm(
        T.i32(), [Uint32(word).ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=r,r", has_side_effects=True,
        is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip))


@dsl_user_op
def _larger_pair(a, b, pair, *, loc=None, ip=None):
    """The larger of each of two pairs of magnitudes, NaN where one is; with some sign."""
    return Uint32(llvm.inline_asm(
        T.i32(), [Uint32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], f"max.NaN.xorsign.abs.{pair} $0, $1, $2;",
        "=r,r,r", has_side_effects=False, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip))


def _largest(values):
    """max |v|; NaN where one is."""
    found = None
    for v in values:
        v = cute.arch.fmax(v, -v, nan=True)
        found = v if found is None else nan_max(found, v)
    return found


def _lanes_max(value, offsets):
    for offset in offsets:
        value = nan_max(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@dsl_user_op
def _red_max(address, bits, *, loc=None, ip=None):
    """The larger of two unsigned words stays at the global address: of positive floats' bits, NaN the largest."""
    _asm([Int64(address), Uint32(bits)], "red.relaxed.gpu.global.max.u32 [$0], $1;", "l,r", loc, ip)


def build(spec: TileSpec):
    """(kernel, fake arguments)."""
    return Tiles(spec), operands(spec)


def operands(spec: TileSpec):
    """Fake x, q, scale, qt, scale_t, amax; None for what the spec does not have."""
    from ..runtime import fake

    M, N = fake.sym(), fake.sym()
    unit = VECTOR if spec.wide else 1

    def matrix(dtype, shape, unit):
        size = tk.element_type(dtype).width // 8
        return fake.tensor(dtype, shape, (fake.sym64(divisibility=unit), 1), align=min(16, unit * size))

    def scales(rows, kept):
        return fake.tensor("fp32", (rows, fake.sym()), (1, fake.sym64()) if kept else None, align=4)

    row, block, tensor = (spec.granularity == name for name in ("row", "block", "tensor"))
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
