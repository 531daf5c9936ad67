"""A chunk's 64 x 64 scores while they are gathered level by level: registers are short then."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.channels.columns import eights_of_level, words, words_of_level
from tkq.tile.maps import _cvt2

LANES = 32


class Gathered(NamedTuple):
    """What a warpgroup has of scores on one side of the diagonal, as accumulators have them. memory: shared, of the 28
    blocks of 8 x 8 beside the diagonal, each lane's own two numbers, which it writes once and reads itself; diagonal:
    registers, those of its warp's two blocks on it."""

    memory: cute.Tensor
    diagonal: cute.Tensor


def gathered_scores(tile: tk.SharedTile) -> Gathered:
    """Of two numbers of 16 bits a word: nothing so far. tile: room for them."""
    return Gathered(words(tile), _zeros(2, Int32))


def gathered_lower(tile: tk.SharedTile) -> Gathered:
    """Of fp32."""
    plain = cute.recast_ptr(tile.staged.iterator, cute.make_swizzle(0, 4, 3), dtype=Float32)
    size = tile.type.bytes // 4
    return Gathered(cute.make_tensor(plain + tile.stage * size, cute.make_layout(size)), _zeros(4, Float32))


def _zeros(size, dtype):
    found = cute.make_rmem_tensor((size,), dtype)
    found.fill(0)
    return found


def place(row, n):
    """Of a lane's number or pair of numbers: of a block in the row-th eight rows and the n-th eight columns."""
    early, late = min(row, n), max(row, n)
    return (late * (late - 1) // 2 + early) * LANES + tk.lane_id()


def put_scores(to: Gathered, row, n, word):
    """A block's word; of the diagonal one more level's."""
    if row == n:
        to.diagonal[row % 2] = to.diagonal[row % 2] | word
    else:
        to.memory[place(row, n)] = word


def put_lower(to: Gathered, row, n, two, mask):
    """A block's two numbers; of the diagonal those that a word's mask has."""
    if row == n:
        for e, there in enumerate((mask & Int32(1) != 0, mask < 0)):
            at = row % 2 * 2 + e
            to.diagonal[at] = Float32(cutlass.select_(there, two[e], to.diagonal[at]))
    else:
        pair = cute.make_rmem_tensor((2,), Float32)
        pair[0], pair[1] = two
        cute.autovec_copy(pair, _two(to, row, n))


def _two(of, row, n):
    at = of.memory.iterator + 2 * place(row, n)
    return cute.make_tensor(at.align(8), cute.make_layout(2))


def blocks(warp, upper):
    """[(r, n)]: a warp's r-th eight rows and the eight columns of which something is gathered, the diagonal's last."""
    rows = [(r, 2 * warp + r) for r in range(2)]
    return [(r, n) for r, row in rows for n in (range(row + 1, 8) if upper else range(row))] + rows


@cute.jit
def gather_scores(to: Gathered, x: tk.RegTile, part: Constexpr[int], half: Constexpr[int], upper: Constexpr[bool],
                  scale, dtype: Constexpr):
    """scale * x, rounded, where a row and a column are of one level, the row in the later half; upper: in the earlier
    one. half 0 is the diagonal. x: the part-th of the columns, as many as it has."""
    of, mask = x.rows_view, words_of_level(half, upper)
    warp = tk.warp_id() % 4
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for r, n in eights_of_level(w, half, upper, range(part * x.cols // 8, (part + 1) * x.cols // 8)):
                m = 2 * n - part * x.cols // 4
                put_scores(to, 2 * w + r, n, _cvt2(of[r, m] * scale, of[r, m + 1] * scale, dtype) & mask)


@cute.jit
def gather_lower(to: Gathered, x: tk.RegTile, part: Constexpr[int], half: Constexpr[int]):
    """x where a row and a column are of one level, the row in the later half. x: the part-th of the columns."""
    of, mask = x.rows_view, words_of_level(half, False)
    warp = tk.warp_id() % 4
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for r, n in eights_of_level(w, half, False, range(part * x.cols // 8, (part + 1) * x.cols // 8)):
                m = 2 * n - part * x.cols // 4
                put_lower(to, 2 * w + r, n, (of[r, m], of[r, m + 1]), mask)


@cute.jit
def take_scores(p: tk.RegTile, of: Gathered, upper: Constexpr[bool]):
    """p = what was gathered, and zeros on the other side. All read the memory before any writes to it anew."""
    to = cute.recast_tensor(p.tensor, Int32)
    to.fill(0)
    warp = tk.warp_id() % 4
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for r, n in blocks(w, upper):
                to[2 * n + r] = of.diagonal[r] if n == 2 * w + r else of.memory[place(2 * w + r, n)]


@cute.jit
def take_lower(lower: tk.RegTile, of: Gathered):
    """Likewise, of fp32."""
    tk.zero(lower)
    warp, view, two = tk.warp_id() % 4, lower.rows_view, cute.make_rmem_tensor((2,), Float32)
    for w in cutlass.range_constexpr(4):
        if warp == w:
            for r, n in blocks(w, False):
                if n == 2 * w + r:
                    two[0], two[1] = of.diagonal[2 * r], of.diagonal[2 * r + 1]
                else:
                    cute.autovec_copy(_two(of, 2 * w + r, n), two)
                view[r, 2 * n], view[r, 2 * n + 1] = two[0], two[1]
