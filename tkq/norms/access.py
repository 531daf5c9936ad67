"""RowAccess: which elements of which rows a thread holds, and how they come and go. What RowNorm stands on."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import CopyG2ROp

from ..row_copies import RowCopies, both
from ..utils import domain_offset_i64


class Place(NamedTuple):
    """One row of a thread. row: its number, which may be past the end; at: where it is read, (row,) or (position,
    head), within bounds."""

    row: Int32
    at: tuple


class Mine(NamedTuple):
    """What a thread holds of each of its rows: columns from `col` on, and which of its vectors lie within the row (True
    where that is known at compile time). places: its rows. smem: the block's allocator."""

    tidx: Int32
    col: Int32
    inside: tuple
    places: list
    smem: object


class RowAccess(RowCopies):
    """Expects self.spec, self.config and, while the kernel is traced, self.tile."""

    def _past_l1(self):
        return not self.config.split

    # ---- where a thread's elements are ------------------------------------------------------------

    def _places(self, tidx, count, heads):
        """The rows of this thread, of `count` in all. Those of one step of the block lie together."""
        t = self.tile
        first = cute.arch.block_idx()[0] * (t.rows * self.config.rows_each)
        within = tidx // t.threads_per_row if t.rows > 1 else 0
        return [self._place(first + r * t.rows + within, count, heads) for r in range(self.config.rows_each)]

    def _place(self, row, count, heads):
        # a row past the end is loaded as the last one, so that no load needs a test; it is not stored
        at = row if self._whole_grid() else cutlass.min(row, count - 1)
        if self.spec.heads is None:
            return Place(row, (at,))
        position, head = divmod(at, heads)
        return Place(row, (Int32(position), Int32(head)))

    def _whole_grid(self):
        """Does every thread of the grid have rows, whatever M is?"""
        return self.tile.rows * self.config.rows_each == 1

    def _load(self, m, place, mine):
        """Start loading this thread's part of a row of m; where it will be. Vectors outside the row are zero."""
        return self._fetch_row(m, (*place.at, mine.col), mine.inside, mine.smem, mine.tidx)

    # ---- weight and bias ------------------------------------------------------------------------------

    def _vector_atom(self, m):
        bits = min(128, self.spec.vector * m.element_type.width)
        return cute.make_copy_atom(CopyG2ROp(), m.element_type, num_bits_per_copy=bits)

    def _vectors(self, m, coord, inside):
        """All of this thread's elements of weight or bias, if they are to come early."""
        t = self.tile
        if m is None or not self.config.early:
            return None
        source, held = self._view(m, coord), cute.make_rmem_tensor((t.vector, t.blocks), m.element_type)
        for j in range(t.blocks):
            self._fetch(self._vector_atom(m), source[None, j], held[None, j], inside[j])
        return held

    def _vector(self, held, m, coord, inside, j):
        """Vector j of weight or bias, as fp32; None where there is none."""
        if m is None:
            return None
        if held is not None:
            return held[None, j].load().to(Float32)
        one = cute.make_rmem_tensor(self.tile.vector, m.element_type)
        self._fetch(self._vector_atom(m), self._view(m, coord)[None, j], one, inside[j])
        return one.load().to(Float32)

    # ---- stores ---------------------------------------------------------------------------------------

    def _store(self, m, place, mine, packed, j):
        """Vector j of a row of m (M, N)."""
        stored = self._within(mine.inside[j], place, m)
        self._put(self._store_atom(m), packed, self._view(m, (place.row, mine.col))[None, j], stored)

    def _store_scalar(self, m, place, value, chosen, *column):
        """m[row, *column] = value, by the chosen threads."""
        self._put_scalar(domain_offset_i64((place.row, *column), m), value, self._within(chosen, place, m))

    def _within(self, condition, place, m):
        """condition, and the row is one of m's."""
        return condition if self._whole_grid() else both(condition, place.row < m.shape[0])

    @cute.jit
    def _put_scalar(self, dst: cute.Tensor, value: Float32, stored):
        if stored:
            dst[(0,) * len(dst.shape)] = value
