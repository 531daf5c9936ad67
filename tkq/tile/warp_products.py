"""Products by mma.sync, of which each warp has its own 16 rows and waits for no other: with a matrix of 16 x 16 blocks
along the diagonal, all of them the same, where a product by wgmma multiplies zeros three times out of four; and the
diagonal of a product alone, of which wgmma would make all."""
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.cutlass_dsl import T, dsl_user_op

from .assembly import ptx_several
from .block import lane_id, thread_in_warpgroup
from .register import RegTile
from .shared import SharedTile

ROW_BYTES, CHUNK = 128, 16


@dsl_user_op
def _matrices(address: Int32, transposed: bool, *, loc=None, ip=None):
    """Four matrices of 8 x 8, whose rows are where 32 lanes say; a word of each."""
    kind = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    found = ptx_several((Int32(address),), text, "=r,=r,=r,=r,r,~{memory}", loc, ip, [T.i32()] * 4)
    return [Int32(x) for x in found]


@dsl_user_op
def _mma(a, b, c, kind="f16", *, loc=None, ip=None):
    """16 x 16 times 16 x 8, added to c. kind: the type of a and b, as PTX calls it."""
    text = (f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, "
            "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};")
    args = (*(Int32(x) for x in (*a, *b)), *(Float32(x) for x in c))
    found = ptx_several(args, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", loc, ip, [T.f32()] * 4, pure=True)
    return [Float32(x) for x in found]


def _checked(what, tile: SharedTile):
    if not isinstance(tile, SharedTile) or tile.stage is None or tile.type.dtype is not Float16 or (
            tile.type.cols != 64 or tile.type.swizzle != ROW_BYTES):
        raise TypeError(f"{what}: the tile is {tile}, allowed is one of fp16 with 64 columns")


def _address(tile: SharedTile, row, chunk, further: int = 0):
    """Of 8 elements of a row, of which it has 8 times as many; chunk: 0 or 1, further: an even number more."""
    return tile.tensor.iterator.toint() + ((row * ROW_BYTES + (chunk ^ (row & 7)) * CHUNK) ^ (further * CHUNK))


def diagonal_block(tile: SharedTile, transposed=False):
    """The first 16 x 16 numbers of a tile, or those transposed, as `diagonal_mm` takes them: four words of each lane. A
    warp together."""
    _checked("diagonal_block", tile)
    lane = lane_id()
    matrix, row = lane // 8, lane % 8
    if transposed:
        return _matrices(_address(tile, matrix // 2 * 8 + row, matrix % 2), True)
    return _matrices(_address(tile, matrix % 2 * 8 + row, matrix // 2), False)


def diagonal_mm(products, tile: SharedTile):
    """For each (d, block, accumulate) d = or += block @ (a warp's 16 rows of the tile); d: fp32 register tiles of 64
    columns. What other lanes wrote to the tile is there after ``sync_warp``. A warp together."""
    _checked("diagonal_mm", tile)
    for d, _, _ in products:
        if not isinstance(d, RegTile) or d.dtype is not Float32 or d.cols != 64:
            raise TypeError(f"diagonal_mm: operand d is {d}, allowed is a register tile of 64 x 64 fp32")
    lane = lane_id()
    matrix = lane // 8
    row = thread_in_warpgroup() // 32 * 16 + matrix % 2 * 8 + lane % 8
    for j in range(0, 8, 2):
        words = _matrices(_address(tile, row, matrix // 2, j), True)
        for d, block, accumulate in products:
            for n in range(2):
                at = [4 * (j + n) + i for i in range(4)]
                c = [d.tensor[i] if accumulate else Float32(0.0) for i in at]
                found = _mma(block, words[2 * n:2 * n + 2], c)
                for i, x in zip(at, found, strict=True):
                    d.tensor[i] = x


def diagonal_ABt(line, b: SharedTile, first):
    """The dot products of 8 rows with those of b, from ``first`` on, a multiple of 8: of the row lane / 4, in the lanes
    that `has_diagonal` says. line: this row of a lane, (K,) in global memory, from whole 16 bytes on. b: of its type,
    bf16 or fp16, K of 64 or a multiple. A warp together.

    A lane has 16 bytes of every 64 of its row, of both operands, as products do not ask in which order k comes."""
    if not isinstance(b, SharedTile) or b.stage is None or b.type.swizzle != ROW_BYTES or (
            b.type.dtype not in (BFloat16, Float16)):
        raise TypeError(f"diagonal_ABt: b is {b}, allowed is a tile of bf16 or fp16, swizzled by 128 bytes")
    if line.element_type is not b.type.dtype:
        raise TypeError(f"diagonal_ABt: the row is of {line.element_type}, allowed is {b.type.dtype}, as b")
    kind, row, part = "bf16" if b.type.dtype is BFloat16 else "f16", lane_id() // 4, lane_id() % 4
    at = b.tensor.iterator.toint() + (first + row) * ROW_BYTES + (part ^ row) * CHUNK
    found, none = [Float32(0.0)] * 4, Int32(0)
    for n in range(b.type.cols // 32):
        x = _words_of(line, 4 * n + part)
        y = _shared_words((at ^ n % 2 * 64) + n // 2 * b.type.rows * ROW_BYTES)
        for k in (0, 2):
            found = _mma((x[k], none, x[k + 1], none), y[k:k + 2], found, kind)
    return cutlass.select_(row % 2 == 1, found[1], found[0])


def _words_of(line, n):
    """The n-th 16 bytes of a row in global memory: four words."""
    eight = cute.make_rmem_tensor((8,), line.element_type)
    parts = cute.make_tensor(line.iterator, cute.make_layout((8, line.shape[0] // 8), stride=(1, 8)))
    cute.autovec_copy(parts[None, n], eight)
    return list(cute.recast_tensor(eight, Int32)[i] for i in range(4))


@dsl_user_op
def _shared_words(address: Int32, *, loc=None, ip=None):
    """16 bytes of shared memory: four words."""
    text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    found = ptx_several((Int32(address),), text, "=r,=r,=r,=r,r,~{memory}", loc, ip, [T.i32()] * 4)
    return [Int32(x) for x in found]


def has_diagonal():
    """Is this a lane that `diagonal_ABt` gives a number?"""
    return lane_id() % 4 == lane_id() // 8
