"""Products by mma.sync, of which each warp has its own 16 rows and waits for no other: with a matrix of 16 x 16 blocks
along the diagonal, all of them the same, where a product by wgmma multiplies zeros three times out of four; and the
diagonal of a product alone, of which wgmma would make all."""
import cutlass
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


def diagonal_ABt(a: SharedTile, b: SharedTile, first):
    """The dot products of 16 rows of a with those of b, from ``first`` on, a multiple of 8: of the rows lane / 4 and 8
    behind it, in the lanes that `has_diagonal` says. a, b: bf16 or fp16, K of 64 or a multiple. A warp together."""
    for tile in (a, b):
        if not isinstance(tile, SharedTile) or tile.stage is None or tile.type.swizzle != ROW_BYTES or (
                tile.type != a.type or tile.type.dtype not in (BFloat16, Float16)):
            raise TypeError(f"diagonal_ABt: a is {a}, b is {b}, allowed are two alike of bf16 or fp16, swizzled by 128 "
                            "bytes")
    kind, lane = "bf16" if a.type.dtype is BFloat16 else "f16", lane_id()
    row = first + lane // 8 % 2 * 8 + lane % 8
    at = row * ROW_BYTES + (lane // 16 ^ (row & 7)) * CHUNK
    of_a, of_b = (tile.tensor.iterator.toint() for tile in (a, b))
    upper, lower = ([Float32(0.0)] * 4 for _ in range(2))
    for k in range(0, a.type.cols, 16):
        here = (at ^ k % 64 * 2) + k // 64 * a.type.rows * ROW_BYTES
        x, y = _matrices(of_a + here, False), _matrices(of_b + here, False)
        upper, lower = _mma(x, (y[0], y[2]), upper, kind), _mma(x, (y[1], y[3]), lower, kind)
    odd = lane // 4 % 2 == 1
    return cutlass.select_(odd, upper[1], upper[0]), cutlass.select_(odd, lower[3], lower[2])


def has_diagonal():
    """Is this a lane that `diagonal_ABt` gives numbers?"""
    return lane_id() % 4 == lane_id() // 8
