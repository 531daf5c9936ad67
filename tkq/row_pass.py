"""RowPass: one pass over rows that stay on the chip, on ReductionBase: who holds what, how it comes in and goes out.

A thread holds `blocks` vectors of a row, of `rows_each` rows at once. It starts all its loads before it waits for any.
What is done with them is a subclass's: the norms, softmax, cross entropy.
"""
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, CopyR2GOp, LoadCacheMode, StoreCacheMode, cpasync

from . import row_plan
from . import tile as tk
from .reduction_base import ReductionBase
from .reduction_plan import tile as tile_of
from .utils import domain_offset_i64


class Row(NamedTuple):
    """One thread's part of a row: (vector, blocks) in registers or shared memory; which vectors are within the row;
    which block of the cluster this is; the row's exchange buffer and mbarrier; the thread's first column."""

    data: cute.Tensor
    inside: tuple
    rank: Int32
    buffer: cute.Tensor
    mbar_ptr: Optional[cute.Pointer]
    col: Optional[Int32] = None

    def block(self, j):
        """Vector j, as fp32."""
        part = self.data[None, j]
        if part.memspace != cute.AddressSpace.rmem:
            held = cute.make_rmem_tensor_like(part)
            cute.autovec_copy(part, held)
            part = held
        return part.load().to(Float32)


class Place(NamedTuple):
    """Where a thread works that holds one row: the row's number, `there` the same or the last one's, if it is past the
    end; the thread's first column; the rest as in Row."""

    row: Int32
    there: Int32
    col: Int32
    inside: tuple
    rank: Int32
    thread: Int32
    smem: tk.SharedAllocator
    buffer: Optional[cute.Tensor]
    mbar_ptr: Optional[cute.Pointer]

    @property
    def exchange(self):
        """Buffer and mbarrier of the first exchange."""
        return self.buffer[None, None, 0], self.mbar_ptr


class RowPass(ReductionBase):
    """dtype, N, vector: of the rows: element type, columns, elements of one access. config: threads_per_row, threads,
    cluster, load ("registers" or "shared") and rows_each, as attributes. stage: exchanges; one for each row held where
    not given.

    shifted: rows begin at any element. Accesses are whole vectors at multiples of their size all the same: a row's
    first and last one reach over its ends, within 16 bytes of it, and what they bring from there is masked
    (`_masked`). One row to a thread.
    """

    def __init__(self, dtype, N, vector, config, stage=None, reduction_dtype=Float32, shifted=False):
        super().__init__(dtype, N, config.rows_each if stage is None else stage, reduction_dtype)
        self.vector, self.config, self.shifted = vector, config, shifted

    def _calculate_threads_per_row(self):
        return self.config.threads_per_row

    def _get_num_threads(self):
        return self.config.threads

    def _set_cluster_n(self):
        self.cluster_n = self.config.cluster

    def _get_tile(self, num_copy_bits: int = 128):
        if not self.shifted:
            return super()._get_tile(num_copy_bits)
        columns = row_plan.span(self.N, self.vector, True)
        t = tile_of(columns, self.vector, self._calculate_threads_per_row(), self._get_num_threads(), self.cluster_n)
        self.cluster_n = t.cluster
        return t

    # ---- host ---------------------------------------------------------------------------------------

    def _layout(self):
        """The thread-value layout; sets `tile`. First in `__call__`."""
        self._set_cluster_n()
        bits = self.vector * self.dtype.width
        _, tv_layout = self._get_tv_layout(bits)
        self.tile = self._get_tile(bits)
        return tv_layout

    def _launch_shape(self, rows):
        """grid, block and cluster for so many rows."""
        return dict(grid=[cute.ceil_div(rows, self.tile.rows * self.config.rows_each), self.cluster_n, 1],
                    block=[self.tile.threads, 1, 1],
                    cluster=[1, self.cluster_n, 1] if self.cluster_n > 1 else None)

    # ---- where a thread's elements are ------------------------------------------------------------

    def _column(self, tidx, rank):
        """This thread's first column; its vectors are `vector * threads_per_row` columns apart."""
        t = self.tile
        col = tidx % t.threads_per_row * t.vector
        return rank * t.cols + col if t.cluster > 1 else col

    def _shift(self, m, row):
        """How many elements of its first 16 bytes lie before the row."""
        address = domain_offset_i64((row, 0), m).iterator.toint()
        return Int32((address & 15) // (self.dtype.width // 8))

    def _view(self, m, coord):
        """This thread's (vector, blocks) of a row of m, from `coord` on."""
        t = self.tile
        layout = cute.make_layout((t.vector, t.blocks), stride=(1, t.vector * t.threads_per_row))
        first = domain_offset_i64(coord, m).iterator
        if self.shifted:  # `coord` was chosen so that it is
            first = cute.make_ptr(m.element_type, first.toint(), m.memspace, assumed_align=16)
        return cute.make_tensor(first, layout)

    def _inside(self, col):
        """For each vector: does it lie within the row? True at compile time where no thread's can lie outside."""
        t = self.tile
        step = t.vector * t.threads_per_row
        furthest = t.cols * (t.cluster - 1) + step
        return tuple(True if furthest + j * step <= self.N else col + j * step < self.N for j in range(t.blocks))

    def _whole(self, j):
        """At compile time: is all of vector j in the row, in every thread?"""
        t = self.tile
        step = t.vector * t.threads_per_row
        return t.cols * (t.cluster - 1) + (j + 1) * step <= self.N and not (self.shifted and j == 0)

    def _masked(self, x, row: Row, j, neutral):
        """x, fp32 made of vector j, with `neutral` for elements outside the row."""
        if self._whole(j):
            return x
        t = self.tile
        masked = cute.make_rmem_tensor(t.vector, Float32)
        masked.store(x)
        for i in range(t.vector):
            inside = row.inside[j]
            if self.shifted:
                inside = Uint32(row.col + (j * t.vector * t.threads_per_row + i)) < self.N
            masked[i] = cutlass.select_(inside, masked[i], Float32(neutral))
        return masked.load()

    def _block(self):
        """(which tile of rows, which part of them) this block has."""
        tile, part, _ = cute.arch.block_idx()
        return tile, part

    def _rows(self, tidx):
        """The rows of this thread. Those of one step of the block lie together."""
        t = self.tile
        first = self._block()[0] * (t.rows * self.config.rows_each)
        within = tidx // t.threads_per_row if t.rows > 1 else 0
        return [first + r * t.rows + within for r in range(self.config.rows_each)]

    def _whole_grid(self):
        """Does every thread of the grid have rows, whatever M is?"""
        return self.tile.rows * self.config.rows_each == 1

    def _there(self, row, rows):
        """A row past the end is read as the last one, so that no load needs a test; it is not stored."""
        return row if self._whole_grid() else cutlass.min(row, rows - 1)

    def _place(self, m, tv_layout):
        """For kernels whose threads hold one row: where this thread works on m, (M, N). Starts the cluster."""
        thread, _, _ = cute.arch.thread_idx()
        smem, buffer, mbar_ptr = tk.SharedAllocator(), None, None
        if self.stage:
            buffer, mbar_ptr = self._allocate_reduction_buffer_and_mbar(smem, tv_layout)
            self._initialize_cluster(thread, mbar_ptr, self.tile.threads // 32)
        _, rank = self._block()
        row = self._rows(thread)[0]
        there = self._there(row, m.shape[0])
        col = self._column(thread, rank)
        if self.shifted:
            col = col - self._shift(m, there)
        return Place(row, there, col, self._inside(col), rank, thread, smem, buffer, mbar_ptr)

    def _row(self, m, place):
        """Start loading this thread's part of its row of m."""
        held = self._load(place.smem, m, [place.row], place.col, place.inside, place.thread)[0]
        buffer, mbar_ptr = place.exchange if self.stage else (None, None)
        return Row(held, place.inside, place.rank, buffer, mbar_ptr, place.col)

    # ---- copies -------------------------------------------------------------------------------------

    def _streams(self):
        """Are x and the output marked as used once? It pays beside whole vectors in registers (bench/tune_norms.py)."""
        return self.config.load == "registers" and self.vector * self.dtype.width == 128

    def _past_l1(self):
        """Do copies to shared memory go past L1? Only those of 16 bytes can."""
        return self.vector * self.dtype.width == 128

    def _load_atom(self):
        bits = self.vector * self.dtype.width
        if self.config.load == "shared":
            op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL if self._past_l1() else LoadCacheMode.ALWAYS)
            return cute.make_copy_atom(op, self.dtype, num_bits_per_copy=bits)
        hint = dict(l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE) if self._streams() else {}
        return cute.make_copy_atom(CopyG2ROp(), self.dtype, num_bits_per_copy=bits, **hint)

    def _store_atom(self):
        hint = dict(store_cache_mode=StoreCacheMode.STREAMING) if self._streams() else {}
        bits = self.vector * self.dtype.width
        return cute.make_copy_atom(CopyR2GOp(), self.dtype, num_bits_per_copy=bits, **hint)

    def _load(self, smem, mX, rows, col, inside, tidx):
        """Start loading this thread's part of each row; where they will be. Vectors outside the row are zero."""
        t, atom, held = self.tile, self._load_atom(), []
        for row in rows:
            source = self._view(mX, (self._there(row, mX.shape[0]), col))
            if self.config.load == "shared":
                layout = cute.make_layout((t.vector, t.blocks, t.threads), stride=(1, t.vector * t.threads, t.vector))
                x = smem.allocate_tensor(self.dtype, layout, byte_alignment=16)[None, None, tidx]
            else:
                x = cute.make_rmem_tensor((t.vector, t.blocks), self.dtype)
            for j in range(t.blocks):
                self._fetch(atom, source[None, j], x[None, j], inside[j])
            held.append(x)
        if self.config.load == "shared":
            cute.arch.cp_async_commit_group()
        return held

    def _landed(self):
        """Wait for what `_load` started; registers wait by themselves."""
        if self.config.load == "shared":
            cute.arch.cp_async_wait_group(0)

    def _forget(self):
        """Between two passes over shared memory: or the compiler keeps what the first one read, as fp32."""
        if self.config.load == "shared":
            cute.arch.sync_warp()

    def _packed(self, y):
        packed = cute.make_rmem_tensor(self.tile.vector, self.dtype)
        packed.store(y.to(self.dtype))
        return packed

    def _store(self, mO, row, col, inside, j, packed):
        """Vector j of a row."""
        stored = inside[j] if self._whole_grid() else _both(inside[j], row < mO.shape[0])
        to = self._view(mO, (row, col))[None, j]
        if self.shifted and not self._whole(j):
            self._put_elements(packed, to, stored, col + j * (self.tile.vector * self.tile.threads_per_row))
        else:
            self._put(self._store_atom(), packed, to, stored)

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
    def _put_elements(self, src: cute.Tensor, dst: cute.Tensor, stored, col):
        """Those of the vector's elements that are in the row; the vector begins at column `col`."""
        if const_expr(stored is True):
            stored = Boolean(True)
        if stored:
            if col >= 0 and col + self.vector <= self.N:
                cute.copy(self._store_atom(), src, dst)
            else:
                for i in cutlass.range_constexpr(self.vector):
                    if Uint32(col + i) < self.N:
                        dst[i] = src[i]


def _both(a, b):
    if a is True or b is True:
        return b if a is True else a
    return a & b
