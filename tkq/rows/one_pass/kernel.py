"""OnePassRows: one pass over rows that stay on the chip, on ReductionBase: which thread holds what, how it is loaded
and stored.

A thread holds `blocks` vectors of one row. It starts all its loads before it waits for any. What is done with them is
up to the kernel that a OnePassRows is a part of: softmax, cross entropy. Such a kernel hands each thread's `Here` to a
method that does all the work, so that a test can call that for one thread after the other on a CPU.
"""
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Uint32, const_expr

from ... import tile as tk
from ...reduction_base import ReductionBase
from ...utils import domain_offset_i64
from . import plan
from .columns import Columns
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


class OnePassRows(ReductionBase):
    """A part of a kernel: its rows, and which thread has what of them.

    spec: with N, x, vector and shifted: columns, element type, elements of one access, and where rows begin. config: a
    RowConfig. stage: exchanges, of a `reduction_dtype` each. past_l1: as `RowCopies` has it. columns: `Columns` or
    `InterleavedColumns`.

    Without an exchange blocks know nothing of each other: they go along the rows, `config.cluster` of them to each.

    shifted: rows begin at any element. Accesses are whole vectors at multiples of their size all the same: a row's
    first and last one reach over its ends, within 16 bytes of it, and what they bring from there is masked (`masked`).
    """

    def __init__(self, spec, config, stage=1, reduction_dtype=Float32, past_l1=False, columns=Columns):
        super().__init__(tk.element_type(spec.x), spec.N, stage, reduction_dtype)
        self.vector, self.config, self.shifted = spec.vector, config, spec.shifted
        self.tile = plan.tile(spec, config)
        self._set_cluster_n()
        self.columns = columns(self.tile, self.N)
        self.copies = RowCopies(self.columns, config.load, past_l1, self.shifted)

    def _calculate_threads_per_row(self):
        return self.tile.threads_per_row

    def _get_num_threads(self):
        return self.tile.threads

    def _set_cluster_n(self):
        self.cluster_n = self.tile.cluster

    def _get_tile(self, num_copy_bits: int = 128):
        return self.tile

    # ---- host ---------------------------------------------------------------------------------------

    def layout(self):
        """The thread-value layout, for `here`."""
        return self._get_tv_layout(self.vector * self.dtype.width)[1]

    def launch_shape(self, rows):
        """grid, block and cluster for a number of rows."""
        tiles = cute.ceil_div(rows, self.tile.rows)
        if not self.stage:
            return dict(grid=[tiles * self.tile.cluster, 1, 1], block=[self.tile.threads, 1, 1])
        min_blocks_per_sm = self.config.min_blocks_per_sm
        together = dict(min_blocks_per_mp=min_blocks_per_sm, preferred_smem_carveout=100) if min_blocks_per_sm else {}
        return dict(grid=[tiles, self.cluster_n, 1], block=[self.tile.threads, 1, 1],
                    cluster=[1, self.cluster_n, 1] if self.cluster_n > 1 else None, **together)

    # ---- where a thread's elements are ------------------------------------------------------------

    def shift(self, m, row):
        """How many elements of its first 16 bytes lie before the row."""
        address = domain_offset_i64((row, 0), m).iterator.toint()
        return Int32((address & 15) // (self.dtype.width // 8))

    def first(self, place, j):
        """The column that vector j begins with."""
        return place.col + j * self.columns.pace

    def whole(self, j):
        """At compile time: is all of vector j in the row, in every thread?"""
        return self.columns.whole(j) and not (self.shifted and j == 0)

    def masked(self, x, row: Row, j, neutral):
        """x, fp32 made of vector j, with `neutral` for elements outside the row."""
        if self.whole(j):
            return x
        masked = cute.make_rmem_tensor(self.vector, Float32)
        masked.store(x)
        for i in range(self.vector):
            inside = row.place.inside[j]
            if self.shifted:
                inside = Uint32(self.first(row.place, j) + i) < self.N
            masked[i] = cutlass.select_(inside, masked[i], Float32(neutral))
        return masked.load()

    def block(self):
        """(which tile of rows, which part of them) this block has."""
        if self.stage:
            tile, part, _ = cute.arch.block_idx()
            return tile, part
        block, parts = cute.arch.block_idx()[0], self.tile.cluster
        return (block // parts, block % parts) if parts > 1 else (block, 0)

    def here(self, tv_layout):
        """First in a kernel. Starts the cluster."""
        thread, _, _ = cute.arch.thread_idx()
        smem, buffer, mbar_ptr = tk.SharedAllocator(), None, None
        if self.stage:
            buffer, mbar_ptr = self._allocate_reduction_buffer_and_mbar(smem, tv_layout)
            self._initialize_cluster(thread, mbar_ptr, self.tile.threads // 32)
        return Here(thread, *self.block(), smem, buffer, mbar_ptr)

    def place(self, here, m):
        """Where this thread works on the rows of m, (M, N)."""
        t = self.tile
        row = here.tile * t.rows + here.thread // t.threads_per_row if t.rows > 1 else here.tile
        # a row past the end is read as the last one, so that no load needs a test; it is not stored
        there = cutlass.min(row, m.shape[0] - 1) if t.rows > 1 else row
        col = self.columns.first(here.thread, here.part)
        if self.shifted:
            col = col - self.shift(m, there)
        return Place(here, row, there, col, self.columns.inside(col))

    # ---- copies -------------------------------------------------------------------------------------

    def row(self, m, place):
        """Start loading this thread's part of its row of m. Vectors outside the row are zero."""
        here = place.here
        held = self.copies.fetch_row(m, (place.there, place.col), place.inside, here.smem, here.thread)
        if self.config.load == "shared":
            cute.arch.cp_async_commit_group()
        return Row(held, place, 0)

    def landed(self):
        """Wait for what `row` started; registers wait by themselves."""
        if self.config.load == "shared":
            cute.arch.cp_async_wait_group(0)

    def store(self, m, place, j, packed):
        """Vector j of this thread's row of m."""
        stored = place.inside[j] if self.tile.rows == 1 else both(place.inside[j], place.row < m.shape[0])
        to, atom = self.copies.view(m, (place.row, place.col))[None, j], self.copies.store_atom(m)
        if self.shifted and not self.whole(j):
            self._put_elements(atom, packed, to, stored, self.first(place, j))
        else:
            self.copies.put(atom, packed, to, stored)

    @cute.jit
    def _put_elements(self, atom: Constexpr, src: cute.Tensor, dst: cute.Tensor, stored, col):
        """Those of the vector's elements that are in the row; the vector begins at column `col`."""
        if const_expr(stored is True):
            stored = Boolean(True)
        if stored:
            if col >= 0 and col + self.vector <= self.N:
                self.copies.copy(atom, src, dst)
            else:
                for i in cutlass.range_constexpr(self.vector):
                    if Uint32(col + i) < self.N:
                        dst[i] = src[i]
