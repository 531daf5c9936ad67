"""Partitions of rows and columns: of a grid to blocks, of a block to threads."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

from ...utils import widened
from .shape import WARP, RowPlan


@dataclass(frozen=True)
class BlockPartition:
    """A block's part: tiles of rows from ``first`` on, ``step`` rows apart; ``limit`` columns from ``col0`` on.

    unit: which cluster (or block, without clusters) of ``units``; rank: which block of its cluster."""

    rows: Int32
    first: Int32
    step: Int32
    tiles: Int32
    unit: Int32
    units: Int32
    rank: Int32
    col0: Int32
    limit: Int32


def block_partition(p: RowPlan, rows) -> BlockPartition:
    """Of this block, in an (M, N) problem of ``rows`` rows. Tile i of the whole goes to unit i % units."""
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    if p.cluster == 1:
        unit, units, rank = block, blocks, Int32(0)
    elif p.held:
        unit, units, rank = block, blocks, cute.arch.block_idx()[1]
    else:
        unit, units, rank = block // p.cluster, blocks // p.cluster, block % p.cluster
    first, step = unit * p.groups, units * p.groups
    col0 = rank * p.cols
    limit = Int32(p.cols) if p.even else cutlass.min(Int32(p.cols), p.N - col0)
    tiles = Int32(1) if p.held else cute.ceil_div(rows - first, step)
    return BlockPartition(rows, first, step, tiles, unit, units, rank, col0, limit)


@dataclass(frozen=True)
class ThreadPartition:
    """A thread's part of its block's: of one row of each tile ``chunks`` vectors, ``threads_per_row`` vectors apart.

    thread: which of the row's threads; warp: which of its warps; group: which row of the tile."""

    plan: Constexpr[RowPlan]
    share: BlockPartition
    group: Int32
    warp: Int32
    thread: Int32

    @property
    def layout(self):
        """(vector, threads of the row, chunks) in a row."""
        p = self.plan
        return cute.make_layout((p.vector, p.threads_per_row, p.chunks),
                                stride=(1, p.vector, p.vector * p.threads_per_row))

    def row(self, tile):
        """The thread's row in the block's tile number ``tile``; in the last one it may be past the end."""
        return self.share.first + tile * self.share.step + self.group

    def exists(self, row):
        """Is it a row? True at compile time where every tile is one row."""
        return True if self.plan.groups == 1 else row < self.share.rows

    def inside(self, j):
        """Is chunk j within the row? True at compile time where no thread's lies outside."""
        p = self.plan
        if p.even and (j + 1) * p.threads_per_row * p.vector <= p.cols:
            return True
        return (j * p.threads_per_row + self.thread) * p.vector < self.share.limit

    def of_row(self, t, row):
        """The thread's (vector, chunks) of a row of an (M, N) tensor in global memory."""
        return self._global(t, Int64(row) * Int64(t.stride[0]))

    def of_vector(self, t, align=16):
        """The thread's (vector, chunks) of an (N,) tensor in global memory, ``align`` bytes aligned."""
        return self._global(t, Int64(0), align)

    def _global(self, t, offset, align=16):
        size = t.element_type.width // 8
        view = global_view(t, offset + self.share.col0 + self.thread * self.plan.vector, self.layout,
                           min(align, self.plan.vector * size))
        return view[None, 0, None]


def thread_partition(p: RowPlan, s: BlockPartition, thread) -> ThreadPartition:
    """Of the thread, counted among those that compute."""
    group, within = (thread // p.threads_per_row, thread % p.threads_per_row) if p.groups > 1 else (Int32(0), thread)
    if p.threads_per_row >= WARP:
        group = cute.arch.make_warp_uniform(group)
    return ThreadPartition(p, s, group, cute.arch.make_warp_uniform(within // WARP), within)


def global_view(t, offset, layout, align):
    """t from element ``offset`` on, the address computed in 64 bits."""
    address = t.iterator.toint() + offset * (t.element_type.width // 8)
    return cute.make_tensor(cute.make_ptr(t.element_type, address, cute.AddressSpace.gmem, assumed_align=align), layout)


@cute.jit
def fetch(dst: cute.Tensor, src: cute.Tensor, inside: Constexpr):
    """dst = src if inside, else 0."""
    if const_expr(inside is True):
        cute.autovec_copy(src, dst)
    else:
        dst.fill(0)
        if inside:
            cute.autovec_copy(src, dst)


@cute.jit
def put(dst: cute.Tensor, src: cute.Tensor, inside: Constexpr, streaming: Constexpr[bool] = False):
    """dst = src if inside. streaming: what is written leaves the caches first."""
    if const_expr(inside is True):
        _store(dst, src, streaming)
    else:
        if inside:
            _store(dst, src, streaming)


def _store(dst, src, streaming):
    bits = cute.size(src) * src.element_type.width
    if streaming and bits <= 128:
        hint = cute.nvgpu.StoreCacheMode.STREAMING
        cute.copy(cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), src.element_type, num_bits_per_copy=bits,
                                      store_cache_mode=hint), src, dst)
    else:
        cute.autovec_copy(src, dst)


def loaded(src, inside) -> Any:
    """A vector in memory as fp32 values; 0 outside."""
    x = cute.make_rmem_tensor(cute.size(src), src.element_type)
    fetch(x, src, inside)
    return widened(x)
