"""OnePassRows: one pass over rows that stay on the chip, on ReductionBase: which thread holds what, how it is loaded
and stored.

A thread holds `blocks` vectors of one row. It starts all its loads before it waits for any. What is done with them is a
subclass's: softmax, cross entropy. Its kernel hands each thread's `Here` to a method that does all the work, so that a
test can call that for one thread after the other on a CPU.
"""
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Uint32, const_expr

from ... import tile as tk
from ...reduction.geometry import tile as tile_of
from ...utils import domain_offset_i64
from . import plan
from .copies import RowCopies, both, floats


class Here(NamedTuple):
    """A thread's index, its block's tile of rows and part of them; the block's memory, the buffers and mbarriers of its
    exchanges (None where it has none)."""

    thread: Int32
    tile: Int32
    part: Int32
    smem: Optional[tk.SharedAllocator]
    buffer: Optional[cute.Tensor]
    mbar_ptr: Optional[cute.Pointer]


class Place(NamedTuple):
    """Where a thread works that holds one row: the row's number, `there` the same or the last one's, if it is past the
    end; the thread's first column; which of its vectors are within the row."""

    here: Here
    row: Int32
    there: Int32
    col: Int32
    inside: tuple


class Row(NamedTuple):
    """One thread's part of a row: (vector, blocks) in registers or shared memory; where it is; the next exchange."""

    data: cute.Tensor
    place: Place
    stage: int

    @property
    def buffer(self):
        """Of the next exchange."""
        return self.place.here.buffer[None, None, self.stage]

    @property
    def mbar_ptr(self):
        """Of the next exchange; None in a single block."""
        first = self.place.here.mbar_ptr
        return None if first is None else first + self.stage

    def block(self, j):
        """Vector j, as fp32."""
        return floats(self.data[None, j])


class OnePassRows(RowCopies):
    """dtype, N, vector: of the rows: element type, columns, elements of one access. config: a RowConfig. stage:
    exchanges.

    shifted: rows begin at any element. Accesses are whole vectors at multiples of their size all the same: a row's
    first and last one reach over its ends, within 16 bytes of it, and what they bring from there is masked (`_masked`).
    """

    def __init__(self, dtype, N, vector, config, stage=1, reduction_dtype=Float32, shifted=False):
        super().__init__(dtype, N, stage, reduction_dtype)
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
        columns = plan.span(self.N, self.vector, True)
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
        min_blocks_per_sm = self.config.min_blocks_per_sm
        together = dict(min_blocks_per_mp=min_blocks_per_sm, preferred_smem_carveout=100) if min_blocks_per_sm else {}
        return dict(grid=[cute.ceil_div(rows, self.tile.rows), self.cluster_n, 1],
                    block=[self.tile.threads, 1, 1],
                    cluster=[1, self.cluster_n, 1] if self.cluster_n > 1 else None, **together)

    # ---- where a thread's elements are ------------------------------------------------------------

    def _shift(self, m, row):
        """How many elements of its first 16 bytes lie before the row."""
        address = domain_offset_i64((row, 0), m).iterator.toint()
        return Int32((address & 15) // (self.dtype.width // 8))

    def _view(self, m, coord):
        view = super()._view(m, coord)
        if self.shifted:  # `coord` was chosen so that it is
            first = cute.make_ptr(m.element_type, view.iterator.toint(), m.memspace, assumed_align=16)
            view = cute.make_tensor(first, view.layout)
        return view

    def _first(self, place, j):
        """The column that vector j begins with."""
        return place.col + j * (self.tile.vector * self.tile.threads_per_row)

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
            inside = row.place.inside[j]
            if self.shifted:
                inside = Uint32(self._first(row.place, j) + i) < self.N
            masked[i] = cutlass.select_(inside, masked[i], Float32(neutral))
        return masked.load()

    def _block(self):
        """(which tile of rows, which part of them) this block has."""
        tile, part, _ = cute.arch.block_idx()
        return tile, part

    def _here(self, tv_layout):
        """First in a kernel. Starts the cluster."""
        thread, _, _ = cute.arch.thread_idx()
        smem, buffer, mbar_ptr = tk.SharedAllocator(), None, None
        if self.stage:
            buffer, mbar_ptr = self._allocate_reduction_buffer_and_mbar(smem, tv_layout)
            self._initialize_cluster(thread, mbar_ptr, self.tile.threads // 32)
        return Here(thread, *self._block(), smem, buffer, mbar_ptr)

    def _place(self, here, m):
        """Where this thread works on the rows of m, (M, N)."""
        t = self.tile
        row = here.tile * t.rows + here.thread // t.threads_per_row if t.rows > 1 else here.tile
        # a row past the end is read as the last one, so that no load needs a test; it is not stored
        there = cutlass.min(row, m.shape[0] - 1) if t.rows > 1 else row
        col = self._column(here.thread, here.part)
        if self.shifted:
            col = col - self._shift(m, there)
        return Place(here, row, there, col, self._inside(col))

    # ---- copies -------------------------------------------------------------------------------------

    def _row(self, m, place):
        """Start loading this thread's part of its row of m. Vectors outside the row are zero."""
        here = place.here
        held = self._fetch_row(m, (place.there, place.col), place.inside, here.smem, here.thread)
        if self.config.load == "shared":
            cute.arch.cp_async_commit_group()
        return Row(held, place, 0)

    def _landed(self):
        """Wait for what `_row` started; registers wait by themselves."""
        if self.config.load == "shared":
            cute.arch.cp_async_wait_group(0)

    def _store(self, m, place, j, packed):
        """Vector j of this thread's row of m."""
        stored = place.inside[j] if self.tile.rows == 1 else both(place.inside[j], place.row < m.shape[0])
        to = self._view(m, (place.row, place.col))[None, j]
        if self.shifted and not self._whole(j):
            self._put_elements(self._store_atom(m), packed, to, stored, self._first(place, j))
        else:
            self._put(self._store_atom(m), packed, to, stored)

    @cute.jit
    def _put_elements(self, atom: Constexpr, src: cute.Tensor, dst: cute.Tensor, stored, col):
        """Those of the vector's elements that are in the row; the vector begins at column `col`."""
        if const_expr(stored is True):
            stored = Boolean(True)
        if stored:
            if col >= 0 and col + self.vector <= self.N:
                self._copy(atom, src, dst)
            else:
                for i in cutlass.range_constexpr(self.vector):
                    if Uint32(col + i) < self.N:
                        dst[i] = src[i]
