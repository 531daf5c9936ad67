"""The pairs of a block of 16 tokens, of which a warp has a chunk's: products of 16 x 16, what of them is kept, and the
inverse of I + L."""
from itertools import product
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp as warp_ops

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.inverse import PITCH, LowerInverse
from tkq.tile.maps import _cvt2

EDGE = 16  # tokens of a block
PANEL = 64  # columns that lie side by side
ROW = CHUNK // 2  # words of a row of a panel


class BlockInverse:
    """(I + L)^-1 of a block, by its warp: L lies in shared memory, fp32, column by column."""

    def __init__(self):
        self.inverse = LowerInverse(0, 3)  # its halves are a warp's; none waits at a barrier

    def room(self, al: tk.SharedAllocator, stages: int = 1) -> cute.Tensor:
        """For L of a chunk's blocks, of which a column has the rows of all four."""
        return al.vector(EDGE * PITCH, stages)

    @cute.jit
    def invert(self, room: cute.Tensor, x: Constexpr, turned: Constexpr[bool] = False):
        """x = (I + x)^-1, turned: its transpose. room: of a chunk. x: registers as `products` leaves them, 0 on the
        diagonal and above it."""
        lane = tk.lane_id()
        lower = cute.make_tensor(room.iterator + tk.warp_id() % 4 * EDGE, cute.make_layout(EDGE * PITCH))
        at = 2 * (lane % 4) * PITCH + lane // 4
        for r, n, e in elements():
            lower[at + (8 * n + e) * PITCH + 8 * r] = x[2 * r + e, 0, n]
        cute.arch.sync_warp()
        self.inverse.solve(lower, lane // 8 % 2 * 8, lane % 8)
        cute.arch.sync_warp()
        self.inverse.pair(lower, 0)
        cute.arch.sync_warp()
        for r, n, e in elements():
            if const_expr(turned):
                row, column = lane // 4 + 8 * r, 2 * (lane % 4) + 8 * n + e
                x[2 * r + e, 0, n] = Float32(0.0) if r > n else lower[row * PITCH + column]
            else:
                x[2 * r + e, 0, n] = Float32(0.0) if n > r else lower[at + (8 * n + e) * PITCH + 8 * r]


def elements():
    """(r, n, e): of a lane's product of 16 x 16, row 8 r, column 8 n + e past its first."""
    return [(r, n, e) for r in range(2) for n in range(2) for e in range(2)]


def products(rows, pairs, columns, dtype):
    """x y' of each pair of rows, of a warp's 16 of 64: two products of 16 x 8 each, registers (4, 1, 2). rows: of each
    a function, n -> the n-th 64 of its columns, a tile."""
    mma = cute.make_mma_atom(warp_ops.MmaF16BF16Op(dtype, Float32, (16, 8, 16)))
    sums = [cute.make_rmem_tensor((4, 1, 2), Float32) for _ in pairs]
    for d in sums:
        d.fill(0.0)
    for panel in range(columns // PANEL):
        held = [tk.rt(PANEL, dtype) for _ in rows]
        for x, of in zip(held, rows):
            tk.load(x, of(panel))
        for step, n in product(range(PANEL // 16), range(2)):
            for d, (i, j) in zip(sums, pairs):
                a = cute.make_tensor(held[i].tensor.iterator + 8 * step, cute.make_layout(((2, 2, 2), 1)))
                b = cute.make_rmem_tensor(((2, 2), 1), dtype)
                of_b, words_of_b = cute.recast_tensor(held[j].tensor, Int32), cute.recast_tensor(b, Int32)
                for e in range(2):  # 8 of the rows, which are this operand's columns
                    words_of_b[e] = of_b[4 * step + n + 2 * e]
                to = cute.make_tensor(d[None, None, n].iterator, cute.make_layout((4, 1, 1)))
                cute.gemm(mma, to, a, b, to)
    return sums


def panels_of(tile: tk.SharedTile):
    """As `products` takes them, of 64 x 128. Slices, as a pointer that is aligned anew loses its swizzle."""
    type = tk.st(CHUNK, PANEL, tile.type.dtype)
    return lambda panel: tk.SharedTile(tile.staged[None, (None, panel), None], type, tile.stage)


def keep(x, diagonal, factor, decay: Any = None, above: bool = False):
    """x times factor(r, n, e), and decay(r, n, e), where a token sees those before it, or those behind it, itself with
    diagonal; else 0, where both may be infinite."""
    row, col = tk.lane_id() // 4, 2 * (tk.lane_id() % 4)
    for r, n, e in elements():
        found = x[2 * r + e, 0, n] * factor(r, n, e)
        found = found if decay is None else found * decay(r, n, e)
        there = row + 8 * r < col + (8 * n + e + diagonal) if above else col + (8 * n + e) < row + (8 * r + diagonal)
        x[2 * r + e, 0, n] = cutlass.select_(there, found, Float32(0.0))


def words(tile: tk.SharedTile) -> Any:
    """A tile of 16 bits as words of two columns each, one after the other as they lie in memory."""
    plain = cute.recast_ptr(tile.staged.iterator, cute.make_swizzle(0, 4, 3), dtype=Int32)
    size = tile.type.bytes // 4
    return cute.make_tensor(plain + tile.stage * size, cute.make_layout(size))


def block_words(tile: tk.SharedTile, beside=0):
    """A warp's block on the diagonal of 64 x 64, or so many blocks beside it, from the last one to the first: where a
    lane's words of the tile are, [r][n]."""
    row, warp = tk.lane_id() // 4, tk.warp_id() % 4
    first, column = (warp * EDGE + row) * ROW, (warp + beside) % (CHUNK // EDGE)
    return words(tile), [[first + 8 * r * ROW + (((8 * column + 4 * n) ^ (4 * row)) + tk.lane_id() % 4)
                          for n in range(2)] for r in range(2)]


def put_block(to, x, dtype):
    """A product of 16 x 16, rounded, at `block_words`."""
    tile, at = to
    for r in range(2):
        for n in range(2):
            tile[at[r][n]] = _cvt2(x[2 * r, 0, n], x[2 * r + 1, 0, n], dtype)


def put_two(tile: tk.SharedTile, x, dtype):
    """A product of 16 x 16 in two parts: rounded, and what that leaves in the block beside it (see `rest_of`). Of keys
    that are alike, rounding alone would move the inverse's elements the same way, and corrected values with them."""
    (to, at), (_, beside) = block_words(tile), block_words(tile, 1)
    for r in range(2):
        for n in range(2):
            two = x[2 * r, 0, n], x[2 * r + 1, 0, n]
            rounded = _cvt2(*two, dtype)
            held = unpacked(rounded, dtype)
            to[at[r][n]], to[beside[r][n]] = rounded, _cvt2(two[0] - held[0], two[1] - held[1], dtype)


def rest_of(block):
    """(first, how many) columns of a block's second part."""
    return (block + 1) % (CHUNK // EDGE) * EDGE, EDGE


def unpacked(word, dtype):
    """Two numbers of 16 bits, as fp32."""
    if dtype is BFloat16:
        return (word << Int32(16)).bitcast(Float32), (word & Int32(-65536)).bitcast(Float32)
    two = cute.make_rmem_tensor((2,), dtype)
    cute.recast_tensor(two, Int32)[0] = word
    return [Float32(two[e]) for e in range(2)]
