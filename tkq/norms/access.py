"""RowAccess: which elements of which rows a thread holds, and how they come and go. What RowNorm stands on."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, CopyR2GOp, LoadCacheMode, StoreCacheMode, cpasync

from ..reduction_base import ReductionBase
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


class RowAccess(ReductionBase):
    """Expects self.spec, self.config and, while the kernel is traced, self.tile."""

    # ---- where a thread's elements are ------------------------------------------------------------

    def _view(self, m, coord):
        """This thread's (vector, blocks) of a row of m, from `coord` on."""
        t = self.tile
        layout = cute.make_layout((t.vector, t.blocks), stride=(1, t.vector * t.threads_per_row))
        return cute.make_tensor(domain_offset_i64(coord, m).iterator, layout)

    def _inside(self, col):
        """For each vector: does it lie within the row? True at compile time where no thread's can lie outside."""
        t = self.tile
        step = t.vector * t.threads_per_row
        furthest = t.cols * (t.cluster - 1) + step
        return tuple(True if furthest + j * step <= self.N else col + j * step < self.N for j in range(t.blocks))

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

    # ---- loads ----------------------------------------------------------------------------------------

    def _streams(self):
        """Are x and the output marked as used once? It pays beside whole vectors in registers (bench/tune_norms.py)."""
        return self.config.load == "registers" and self.spec.access == 128

    def _load_atom(self, m):
        bits = self.spec.vector * m.element_type.width
        if self.config.load == "shared":
            past_l1 = bits == 128 and not self.config.split  # only 16-byte copies can go past it
            op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL if past_l1 else LoadCacheMode.ALWAYS)
            return cute.make_copy_atom(op, m.element_type, num_bits_per_copy=bits)
        hint = dict(l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE) if self._streams() else {}
        return cute.make_copy_atom(CopyG2ROp(), m.element_type, num_bits_per_copy=bits, **hint)

    def _load(self, m, place, mine):
        """Start loading this thread's part of a row of m; where it will be. Vectors outside the row are zero."""
        t = self.tile
        source = self._view(m, (*place.at, mine.col))
        if self.config.load == "shared":
            layout = cute.make_layout((t.vector, t.blocks, t.threads), stride=(1, t.vector * t.threads, t.vector))
            held = mine.smem.allocate_tensor(m.element_type, layout, byte_alignment=16)[None, None, mine.tidx]
        else:
            held = cute.make_rmem_tensor((t.vector, t.blocks), m.element_type)
        for j in range(t.blocks):
            self._fetch(self._load_atom(m), source[None, j], held[None, j], mine.inside[j])
        return held

    def _forget(self):
        """Between two passes over shared memory: or the compiler keeps what the first one read, as fp32."""
        if self.config.load == "shared":
            cute.arch.sync_warp()

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

    def _store_atom(self, m):
        hint = dict(store_cache_mode=StoreCacheMode.STREAMING) if self._streams() else {}
        bits = self.spec.vector * m.element_type.width
        return cute.make_copy_atom(CopyR2GOp(), m.element_type, num_bits_per_copy=bits, **hint)

    def _packed(self, y, m):
        """A vector of floats as m's elements."""
        packed = cute.make_rmem_tensor(self.tile.vector, m.element_type)
        packed.store(y.to(m.element_type))
        return packed

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

    # ---- copies ---------------------------------------------------------------------------------------

    @cute.jit
    def _fetch(self, atom: Constexpr, src: cute.Tensor, dst: cute.Tensor, inside):
        """dst = src if inside, else 0."""
        if const_expr(inside is True):
            self._copy(atom, src, dst)
        else:
            if inside:
                self._copy(atom, src, dst)
            else:
                dst.fill(0)

    def _copy(self, atom, src, dst):
        """As many copies as the vector has parts of the atom's size."""
        part = cute.make_layout(cute.size(atom.layout_src_tv))
        cute.copy(atom, cute.logical_divide(src, part), cute.logical_divide(dst, part))

    @cute.jit
    def _put(self, atom: Constexpr, src: cute.Tensor, dst: cute.Tensor, stored):
        if const_expr(stored is True):
            cute.copy(atom, src, dst)
        else:
            if stored:
                cute.copy(atom, src, dst)

    @cute.jit
    def _put_scalar(self, dst: cute.Tensor, value: Float32, stored):
        if stored:
            dst[(0,) * len(dst.shape)] = value


def both(a, b):
    """a and b, where either may be True at compile time."""
    if a is True or b is True:
        return b if a is True else a
    return a & b
