"""Between registers and memory: a warpgroup's tiles to and from shared tiles, rows and elements to global memory."""
import functools

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, warp, warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from .assembly import ptx
from .block import lane_id, thread_in_warpgroup
from .dtypes import FP8, HALF
from .maps import copy
from .register import ROWS, ColVec, RegTile, RowVec, first_col, first_row, rt
from .shared import SharedTile


def _shapes(what, tile: RegTile, shared: SharedTile, transposed=False):
    if not isinstance(tile, RegTile):
        raise TypeError(f"{what}: the register operand must be a register tile, got {tile}")
    if not isinstance(shared, SharedTile) or shared.stage is None:
        raise TypeError(f"{what}: the shared operand must be one tile (index the ring), got {shared}")
    rows, cols = (shared.type.cols, shared.type.rows) if transposed else (shared.type.rows, shared.type.cols)
    if (rows, cols) != (ROWS, tile.cols):
        raise ValueError(f"{what}: the register tile is {tile}, the shared tile is {shared.type}")


def _accumulator_mma(dtype, cols):
    """The wgmma whose accumulator has the tile's layout: what the copy atoms are laid out by."""
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, cols, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K,
                                OperandMajorMode.K)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def _narrowed(what, dst: SharedTile, src: RegTile):
    if dst.type.dtype not in HALF or src.dtype not in (Float32, dst.type.dtype):
        to = "bf16 and fp16" if what == "store_T" else "fp32, bf16 and fp16"
        raise TypeError(f"{what}: src is {src}, dst is {dst.type}, allowed are fp32 to {to}, and 16 bits to the same")
    if src.cols % 16:
        raise ValueError(f"{what}: src is {src}, allowed with 16-bit dst are multiples of 16 columns")
    if src.dtype is not Float32:
        return src
    narrow = rt(src.cols, dst.type.dtype)
    copy(narrow, src)
    return narrow


def store(dst: SharedTile, src: RegTile):
    """dst = src, converted to dst's type: stmatrix for 16 bits, 8-byte stores for fp32. The warpgroup together; others
    see it after ``publish`` (TMA, wgmma) and a barrier."""
    _shapes("store", src, dst)
    if dst.type.dtype is Float32 and src.dtype is Float32:
        atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=64)
        mma = _accumulator_mma(BFloat16, src.cols)
    else:
        src = _narrowed("store", dst, src)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dst.type.dtype)
        mma = _accumulator_mma(dst.type.dtype, src.cols)
    thr = cute.make_tiled_copy_C(atom, mma).get_slice(thread_in_warpgroup())
    cute.copy(atom, thr.retile(src.acc_view), thr.partition_D(dst.tensor))


def store_T(dst: SharedTile, src: RegTile):
    """dst = src.T, a 16-bit tile of (cols, 64): stmatrix.trans. The warpgroup together."""
    _shapes("store_T", src, dst, transposed=True)
    src = _narrowed("store_T", dst, src)
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), dst.type.dtype)
    thr = cute.make_tiled_copy_C(atom, _accumulator_mma(dst.type.dtype, src.cols)).get_slice(thread_in_warpgroup())
    cute.copy(atom, thr.retile(src.acc_view), thr.partition_D(dst.staged_T[None, None, dst.stage]))


def load(dst: RegTile, src: SharedTile):
    """dst = src, of the same type: ldmatrix for 8 and 16 bits (an A operand), 8-byte loads for fp32 (an accumulator).
    The warpgroup together."""
    _shapes("load", dst, src)
    if dst.dtype is not src.type.dtype:
        raise TypeError(f"load: dst is {dst}, src is {src.type}: the types must be the same")
    if dst.dtype is Float32:
        atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=64)
        thr = cute.make_tiled_copy_C(atom, _accumulator_mma(BFloat16, dst.cols)).get_slice(thread_in_warpgroup())
        cute.copy(atom, thr.partition_S(src.tensor), thr.retile(dst.acc_view))
        return
    d, s, dtype = dst.tensor, src.tensor, dst.dtype
    if dtype in FP8:  # bytes go in pairs: the same matrices
        halves = cute.make_layout(((2, 2, 2), 1, dst.cols // 32))
        d = cute.make_tensor(cute.recast_ptr(d.iterator, dtype=BFloat16), halves)
        s, dtype = src.pairs.tensor, BFloat16
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (ROWS, 64, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K,
                                OperandMajorMode.K)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype)
    thr = cute.make_tiled_copy_A(atom, cute.make_tiled_mma(cute.make_mma_atom(op))).get_slice(thread_in_warpgroup())
    cute.copy(atom, thr.partition_S(s), thr.retile(d))


def arrived(*loaded):
    """Goes on once what ``load`` or ``load_T`` brings to 16-bit tiles, or ``load_rows`` to row vectors, is in their
    registers. Before the stage that it comes from is released: an arrival overtakes loads that wait for shared memory
    while other warpgroups' products read it, and the next copy is there before they are done. Whole warps call it.

    Raises:
        TypeError: when traced, naming what is neither."""
    words = []
    for x in loaded:
        if not isinstance(x, RowVec) and (not isinstance(x, RegTile) or x.dtype not in HALF):
            raise TypeError(f"arrived: got {x}, allowed are 16-bit register tiles and row vectors")
        of_x, step = cute.recast_tensor(x.tensor, Int32), 1 if isinstance(x, RowVec) else 4  # ldmatrix brings four
        words += [of_x[i] for i in range(0, cute.size(of_x), step)]
    if words:
        _hold(functools.reduce(lambda a, b: a | b, words))


@dsl_user_op
def _hold(word, *, loc=None, ip=None):
    """What follows waits for this number, which decides about a fence: with one value of 2^32 there is one."""
    ptx([Int32(word)], f"{{ .reg .pred p; setp.eq.u32 p, $0, {0x7fc1beef}; @p fence.acq_rel.cta; }}", "r", loc, ip)


def load_T(dst: RegTile, src: SharedTile):
    """dst = src.T, of a 16-bit tile of (cols, 64) of the same type: ldmatrix.trans, an A operand. The warpgroup
    together."""
    _shapes("load_T", dst, src, transposed=True)
    if dst.dtype not in HALF or dst.dtype is not src.type.dtype:
        raise TypeError(f"load_T: dst is {dst}, src is {src.type}: allowed are the same 16-bit types")
    op = warpgroup.MmaF16BF16Op(dst.dtype, Float32, (ROWS, 64, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K,
                                OperandMajorMode.K)
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), dst.dtype)
    thr = cute.make_tiled_copy_A(atom, cute.make_tiled_mma(cute.make_mma_atom(op))).get_slice(thread_in_warpgroup())
    cute.copy(atom, thr.partition_S(src.staged_T[None, None, src.stage]), thr.retile(dst.tensor))


def load_shared_cols(v: ColVec, src: cute.Tensor):
    """v[j] = src[j]; src: v.cols fp32 in shared memory, aligned to 8 bytes. By 8-byte loads; any thread."""
    if not isinstance(src, cute.Tensor):
        raise TypeError(f"load_shared_cols: src is {src}, allowed is a tensor of fp32 in shared memory")
    if not isinstance(v, ColVec) or src.element_type is not Float32 or cute.size(src) != v.cols:
        raise ValueError(f"load_shared_cols: v is {v}, src is {src.element_type} of shape {src.shape}: "
                         "allowed are a column vector and as many fp32")
    pairs = cute.make_tensor(src.iterator, cute.make_layout((2, v.cols // 2)))
    to = cute.make_tensor(v.tensor.iterator, cute.make_layout((2, v.cols // 8)))
    for j in range(v.cols // 8):
        cute.autovec_copy(pairs[None, lane_id() % 4 + 4 * j], to[None, j])


# ---- global memory -------------------------------------------------------------------------------


def _vector(what, v, kind, x):
    if not isinstance(v, kind):
        raise TypeError(f"{what}: the operand in registers is {v}, allowed is a {kind.__name__}")
    if cute.rank(x) != 1:
        raise ValueError(f"{what}: the global tensor has {cute.rank(x)} dimensions, allowed is 1")


def _matrix(what, x):
    if cute.rank(x) != 2:
        raise ValueError(f"{what}: the global tensor has {cute.rank(x)} dimensions, allowed are 2")


def _tile(what, x):
    if not isinstance(x, RegTile):
        raise TypeError(f"{what}: src is {x}, allowed is a register tile")


def load_rows(v: RowVec, src: cute.Tensor, row0, limit):
    """v[i] = src[row0 + i], as fp32; rows from ``limit`` (1 or more) on repeat the last one. Each thread, its own two
    rows."""
    _vector("load_rows", v, RowVec, src)
    for r in range(2):
        v.tensor[r] = Float32(src[cutlass.min(row0 + first_row() + 8 * r, limit - 1)])


def load_cols(v: ColVec, src: cute.Tensor, col0, limit):
    """v[j] = src[col0 + j], as fp32; columns from ``limit`` (1 or more) on repeat the last one. Each thread, its own
    columns."""
    _vector("load_cols", v, ColVec, src)
    for j in range(v.cols // 4):
        v.tensor[j] = Float32(src[cutlass.min(col0 + first_col() + 8 * (j // 2) + j % 2, limit - 1)])


@cute.jit
def store_rows(dst: cute.Tensor, src: RowVec, row0, limit):
    """dst[row0 + i] = src[i] for the rows below ``limit``, converted, from one thread of each quad."""
    _vector("store_rows", src, RowVec, dst)
    row = row0 + first_row()
    if lane_id() % 4 == 0:
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < limit:
                dst[row + 8 * r] = dst.element_type(src.tensor[r])


@cute.jit
def store_narrow(dst: cute.Tensor, src: RegTile, row0, limit):
    """dst[row0 + i, j] = src[i, j] for the rows below ``limit`` and the columns of dst, converted to its bf16 or fp16,
    16 bytes at a time: columns contiguous and a multiple of 8, dst and its rows aligned to 16 bytes. Whole warps.

    Without a shared tile between: where none is free. A row's four threads first give each other 8 columns each."""
    _matrix("store_narrow", dst)
    _tile("store_narrow", src)
    if const_expr(dst.element_type not in HALF or src.cols % 32):
        raise ValueError(f"store_narrow: src is {src}, dst is {dst.element_type}, allowed are multiples of 32 columns, "
                         "and bf16 and fp16")
    narrow = rt(src.cols, dst.element_type)
    copy(narrow, src)
    words, lane, cols = cute.recast_tensor(narrow.tensor, Int32), lane_id() % 4, cute.size(dst, mode=[1])
    for r in cutlass.range_constexpr(2):
        row = row0 + first_row() + 8 * r
        for part in cutlass.range_constexpr(src.cols // 32):
            four = _transposed([words[2 * (4 * part + j) + r] for j in range(4)], lane)
            col = 32 * part + 8 * lane
            if row < limit and col < cols:
                at = cute.recast_ptr((dst.iterator + cute.crd2idx((row, col), dst.layout)).align(16), dtype=Int32)
                cute.autovec_copy(four, cute.make_tensor(at, cute.make_layout(4)))


def _transposed(words, lane):
    """Word ``lane`` of each of a quad's four lanes, of four words that each has."""
    w = cute.make_rmem_tensor((4,), Int32)
    for j in range(4):
        w[j] = words[j]
    for step in (2, 1):
        upper = lane & step != 0
        for j in range(4):
            if j & step == 0:
                got = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, w[j], w[j + step]), offset=step)
                w[j], w[j + step] = cutlass.select_(upper, got, w[j]), cutlass.select_(upper, w[j + step], got)
    return w


@cute.jit
def load_from(dst: RegTile, src: cute.Tensor, row0, col0):
    """dst[i, j] = src[row0 + i, col0 + j] as dst's type, 0 past src's end, element by element: any stride, any
    alignment."""
    _matrix("load_from", src)
    _tile("load_from", dst)
    rows, cols = cute.size(src, mode=[0]), cute.size(src, mode=[1])
    view = dst.rows_view
    for r in cutlass.range_constexpr(2):
        row = row0 + first_row() + 8 * r
        for j in cutlass.range_constexpr(dst.cols // 4):
            col = col0 + first_col() + 8 * (j // 2) + j % 2
            view[r, j] = dst.dtype(0.0)
            if row < rows and col < cols:
                view[r, j] = dst.dtype(src[row, col])


@cute.jit
def store_elements(dst: cute.Tensor, src: RegTile, row0, col0, accumulate: Constexpr[bool] = False):
    """dst[row0 + i, col0 + j] = src[i, j] inside dst, converted, element by element: any stride, any alignment.

    accumulate: += instead, in fp32, rounded once."""
    _matrix("store_elements", dst)
    _tile("store_elements", src)
    rows, cols = cute.size(dst, mode=[0]), cute.size(dst, mode=[1])
    view = src.rows_view
    for r in cutlass.range_constexpr(2):
        row = row0 + first_row() + 8 * r
        if row < rows:
            for j in cutlass.range_constexpr(src.cols // 4):
                col = col0 + first_col() + 8 * (j // 2) + j % 2
                if col < cols:
                    if const_expr(accumulate):
                        dst[row, col] = dst.element_type(Float32(view[r, j]) + Float32(dst[row, col]))
                    else:
                        dst[row, col] = dst.element_type(view[r, j])
