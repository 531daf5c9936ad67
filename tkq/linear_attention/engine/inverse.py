"""The inverse of I + L, L strictly lower triangular, of a chunk's tokens."""
from itertools import product

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, TFloat32, const_expr
from cutlass.cute.nvgpu.warp import MmaTF32Op

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK

EDGE = 8  # of blocks that are solved token by token
PITCH = CHUNK + 4  # floats from a column to the next: neighbours of a product's operand lie in other banks


class LowerInverse:
    """X = (I + L)^-1 in the place of L, 64 x 64, fp32, in shared memory, column by column, by a warpgroup:

      half a warp   two blocks of 8 x 8 on the diagonal by substitution, a column a lane
      a warp        the block below these two, X[1, 0] = -X[1, 1] L[1, 0] X[0, 0]
      all           the block of 16 x 16 below two such pairs, likewise: two warps for each
      all           the block of 32 x 32 below two of those, likewise

    Substitution is in fp32. Operands of the products are two TF32 numbers each, 22 bits: where keys are alike, the
    inverse is made of sums that cancel. Above the diagonal L is zero, and so is X."""

    def __init__(self, barrier: int, sums: int):
        """sums: as `Sum` has them, 1 or 3: what there are registers for."""
        self.barrier, self.sums = barrier, sums

    def sync(self):
        tk.sync(self.barrier, tk.WARPGROUP)

    @cute.jit
    def invert(self, lower: cute.Tensor, apart=None):
        """Behind a barrier and before the next one: all 128 threads. apart: is X read only where row and
        column are of one block of 16? None: never so."""
        warp, lane = tk.warp_id() % 4, tk.lane_id()
        self.solve(lower, 2 * EDGE * warp + lane // EDGE % 2 * EDGE, lane % EDGE)
        cute.arch.sync_warp()
        self.pair(lower, 2 * EDGE * warp)
        self.sync()
        if const_expr(apart is None):
            self.merge_all(lower, warp)
        else:
            if not apart:
                self.merge_all(lower, warp)

    @cute.jit
    def merge_all(self, lower: cute.Tensor, warp):
        self.merge(lower, warp // 2 * 4 * EDGE, Int32(0), warp % 2, 2 * EDGE)
        self.merge(lower, Int32(0), warp // 2, warp % 2, 4 * EDGE)

    @cute.jit
    def solve(self, lower: cute.Tensor, first, j):
        """Column j of a block: each element, once it is known, is taken off those below it. By all of a warp, of which
        the first half writes: none waits for others that have gone another way."""
        column, four = cute.make_rmem_tensor((EDGE,), Float32), cute.make_rmem_tensor((4, EDGE // 4), Float32)
        for i in cutlass.range_constexpr(EDGE):
            column[i] = Float32(1.0) if i == j else Float32(0.0)
        for k in cutlass.range_constexpr(EDGE - 1):
            for i in cutlass.range_constexpr((k + 1) // 4, EDGE // 4):
                cute.autovec_copy(four_of(lower, first + 4 * i, first + k), four[None, i])
            for i in cutlass.range_constexpr(k + 1, EDGE):
                column[i] = column[i] - four[i % 4, i // 4] * column[k]
        cute.arch.sync_warp()  # others have read the block
        if tk.lane_id() < 2 * EDGE:
            for i in cutlass.range_constexpr(EDGE // 4):
                for e in cutlass.range_constexpr(4):
                    four[e, i] = column[4 * i + e]
                cute.autovec_copy(four[None, i], four_of(lower, first + 4 * i, first + j))

    @cute.jit
    def pair(self, lower: cute.Tensor, first):
        """The block below two of 8 x 8, by a warp: of the products' 16 rows the upper ones."""
        quad, lane = tk.lane_id() // 4, tk.lane_id() % 4
        left, x, a, b = Sum(1, self.sums), Sum(1, self.sums), operand(4, 1), operand(2, 1)
        a.fill(0.0)
        at = first + EDGE + lane
        for e in cutlass.range_constexpr(2):
            a[2 * e, 0] = element(lower, first + EDGE + quad, at + 4 * e)
            b[e, 0] = element(lower, at + 4 * e, first + quad)
        left.add(a, b)
        for e in cutlass.range_constexpr(2):  # as in `merge`
            a[2 * e, 0] = -left.at(e, 0)
            b[e, 0] = element(lower, first + 2 * lane + e, first + quad)
        x.add(a, b)
        cute.arch.sync_warp()
        for e in cutlass.range_constexpr(2):
            lower[(first + 2 * lane + e) * PITCH + first + EDGE + quad] = x.at(e, 0)

    @cute.jit
    def merge(self, lower: cute.Tensor, first, down, right, size: Constexpr[int]):
        """The block below two neighbours of size x size, the upper one from token `first` on. A warp has 16 of its rows
        and half of its columns."""
        n, steps = size // 16, size // 8
        left, x = Sum(steps, self.sums), Sum(n, self.sums)
        row, col = first + size + 16 * down, first + size // 2 * right
        quad, lane = tk.lane_id() // 4, tk.lane_id() % 4
        a, b = operand(4, 1), operand(2, steps)
        for k in cutlass.range_constexpr(steps):
            at = first + size + 8 * k + lane
            for e in cutlass.range_constexpr(4):
                a[e, 0] = element(lower, row + quad + e % 2 * 8, at + e // 2 * 4)
            for e, j in product(range(2), range(steps)):
                b[e, j] = element(lower, at + 4 * e, first + 8 * j + quad)
            left.add(a, b)
        # what a lane has of this product's columns, 2 t and 2 t + 1, is what it has of the next one's operand: t, t + 4
        b = operand(2, n)
        for k in cutlass.range_constexpr(steps):
            for e in cutlass.range_constexpr(4):
                a[e, 0] = -left.at(e // 2 + e % 2 * 2, k)
            for e, j in product(range(2), range(n)):
                b[e, j] = element(lower, first + 8 * k + 2 * lane + e, col + 8 * j + quad)
            x.add(a, b)
        self.sync()
        for e, j in product(range(4), range(n)):
            lower[(col + 8 * j + 2 * lane + e % 2) * PITCH + row + quad + e // 2 * 8] = x.at(e, j)
        self.sync()


def four_of(lower: cute.Tensor, row, col) -> cute.Tensor:
    """Four rows of a column, from a multiple of 4 on."""
    return cute.make_tensor(lower.iterator + (col * PITCH + row), cute.make_layout((4,)))


def operand(*shape) -> cute.Tensor:
    """Registers of an operand: (value, tiles)."""
    return cute.make_rmem_tensor(shape, Float32)


def element(lower: cute.Tensor, row, col) -> Float32:
    return lower[col * PITCH + row]


class Sum:
    """Registers of a sum of products, `tiles` of 16 x 8. With three sums each of the three products of two operands in
    two parts has its own: none waits for another, where tensor cores have much to do for the state."""

    def __init__(self, tiles: int, sums: int):
        self.parts = [cute.make_rmem_tensor((4, 1, tiles), Float32) for _ in range(sums)]
        for part in self.parts:
            part.fill(0.0)

    def add(self, a: cute.Tensor, b: cute.Tensor):
        """a b, but for what the lesser parts of both give."""
        mma = cute.make_mma_atom(MmaTF32Op((16, 8, 8)))
        (a, a_rest), (b, b_rest) = in_two(a), in_two(b)
        for i, (x, y) in enumerate(((a_rest, b), (a, b_rest), (a, b))):
            d = self.parts[i % len(self.parts)]
            cute.gemm(mma, d, x, y, d)

    def at(self, e, tile) -> Float32:
        """An element."""
        found = [part[e, 0, tile] for part in self.parts]
        return sum(found[1:], found[0])


def in_two(x: cute.Tensor) -> tuple:
    """The upper 11 bits of each number, and what is left."""
    upper, rest = cute.make_rmem_tensor(x.layout, Int32), cute.make_rmem_tensor(x.layout, Float32)
    bits, wide = cute.recast_tensor(x, Int32), cute.recast_tensor(upper, Float32)
    for i in range(cute.size(x)):
        upper[i] = bits[i] & -(1 << 13)
        rest[i] = x[i] - wide[i]
    return cute.recast_tensor(upper, TFloat32), cute.recast_tensor(rest, TFloat32)
