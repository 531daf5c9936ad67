"""RowNorm: what RMSNorm and LayerNorm share. One pass over a row that stays on the chip, on ReductionBase.

A thread holds `blocks` vectors of a row, of `rows_each` rows at once. It starts all its loads before it waits for any;
a subclass turns a row into two scalars (`statistics`) and an element into its normalised value (`normalise`).
"""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority, CopyG2ROp, CopyR2GOp, LoadCacheMode, StoreCacheMode, cpasync

from .. import tile as tk
from ..reduction_base import ReductionBase
from ..utils import domain_offset_i64


class Row(NamedTuple):
    """One thread's part of a row: (vector, blocks) in registers or shared memory; which vectors are within the row;
    which block of the cluster this is; the row's exchange buffer and mbarrier."""

    data: cute.Tensor
    inside: tuple
    rank: Int32
    buffer: cute.Tensor
    mbar_ptr: Optional[cute.Pointer]

    def block(self, j):
        """Vector j, as fp32."""
        part = self.data[None, j]
        if part.memspace != cute.AddressSpace.rmem:
            held = cute.make_rmem_tensor_like(part)
            cute.autovec_copy(part, held)
            part = held
        return part.load().to(Float32)


class RowNorm(ReductionBase):
    def __init__(self, spec, config, reduction_dtype=Float32):
        super().__init__(tk.element_type(spec.x), spec.N, config.rows_each, reduction_dtype)
        self.spec, self.config = spec, config

    def _calculate_threads_per_row(self):
        return self.config.threads_per_row

    def _get_num_threads(self):
        return self.config.threads

    def _set_cluster_n(self):
        self.cluster_n = self.config.cluster

    def statistics(self, row: Row, eps, first: bool):
        """(shift, scale) of the row, in every thread of it. The first one waits for the cluster before it exchanges."""
        raise NotImplementedError

    def normalise(self, x, statistics):
        raise NotImplementedError

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: Optional[cute.Tensor], mB: Optional[cute.Tensor], mO: cute.Tensor,
                 eps: Float32, stream: cuda.CUstream):
        """mX, mO: (M, N); mW, mB: (N,) or None."""
        self._set_cluster_n()
        bits = self.spec.vector * self.dtype.width
        (tile_rows, _), tv_layout = self._get_tv_layout(bits)
        self.tile = self._get_tile(bits)
        self.kernel(mX, mW, mB, mO, eps, tv_layout).launch(
            grid=[cute.ceil_div(mX.shape[0], tile_rows * self.config.rows_each), self.cluster_n, 1],
            block=[self.tile.threads, 1, 1],
            cluster=[1, self.cluster_n, 1] if const_expr(self.cluster_n > 1) else None,
            stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: Optional[cute.Tensor], mB: Optional[cute.Tensor], mO: cute.Tensor,
               eps: Float32, tv_layout: cute.Layout):
        t, config = self.tile, self.config
        tidx, _, _ = cute.arch.thread_idx()
        _, rank, _ = cute.arch.block_idx()
        smem = tk.SharedAllocator()
        buffer, mbar_ptr = self._allocate_reduction_buffer_and_mbar(smem, tv_layout)
        self._initialize_cluster(tidx, mbar_ptr, t.threads // 32)

        col = tidx % t.threads_per_row * t.vector
        if const_expr(self.cluster_n > 1):
            col = rank * t.cols + col
        inside = self._inside(col)
        rows = self._rows(tidx)
        held = self._load_x(smem, mX, rows, col, inside, tidx)
        w, b = self._vectors(mW, col, inside), self._vectors(mB, col, inside)
        if const_expr(config.load == "shared"):
            cute.arch.cp_async_wait_group(0)
        parts = [Row(x, inside, rank, buffer[None, None, r], mbar_ptr + r if self.cluster_n > 1 else None)
                 for r, x in enumerate(held)]
        statistics = [self.statistics(part, eps, r == 0) for r, part in enumerate(parts)]
        self._forget()
        results = []
        for j in cutlass.range_constexpr(t.blocks):
            w_j, b_j = self._vector(w, mW, col, inside, j), self._vector(b, mB, col, inside, j)
            for r in cutlass.range_constexpr(config.rows_each):
                y = self.normalise(parts[r].block(j), statistics[r])
                if const_expr(mW is not None):
                    y = y * w_j
                if const_expr(mB is not None):
                    y = y + b_j
                results.append((r, j, self._packed(y)))
                if const_expr(not config.split):
                    self._store(mO, rows, col, inside, *results.pop())
        if const_expr(config.split):
            cute.arch.sync_warp()  # or the compiler moves each store up to where its result is computed
            for result in results:
                self._store(mO, rows, col, inside, *result)

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

    def _rows(self, tidx):
        """The rows of this thread. Those of one step of the block lie together."""
        t = self.tile
        first = cute.arch.block_idx()[0] * (t.rows * self.config.rows_each)
        within = tidx // t.threads_per_row if t.rows > 1 else 0
        return [first + r * t.rows + within for r in range(self.config.rows_each)]

    def _whole_grid(self):
        """Does every thread of the grid have rows, whatever M is?"""
        return self.tile.rows * self.config.rows_each == 1

    # ---- copies -------------------------------------------------------------------------------------

    def _streams(self):
        """Are x and the output marked as used once? It pays beside whole vectors in registers (bench/tune_norms.py)."""
        return self.config.load == "registers" and self.spec.vector * self.dtype.width == 128

    def _load_atom(self):
        bits = self.spec.vector * self.dtype.width
        if self.config.load == "shared":
            past_l1 = bits == 128 and not self.config.split  # only 16-byte copies can go past it
            op = cpasync.CopyG2SOp(cache_mode=LoadCacheMode.GLOBAL if past_l1 else LoadCacheMode.ALWAYS)
            return cute.make_copy_atom(op, self.dtype, num_bits_per_copy=bits)
        hint = dict(l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE) if self._streams() else {}
        return cute.make_copy_atom(CopyG2ROp(), self.dtype, num_bits_per_copy=bits, **hint)

    def _vector_atom(self, m):
        """For weight and bias."""
        bits = min(128, self.spec.vector * m.element_type.width)
        return cute.make_copy_atom(CopyG2ROp(), m.element_type, num_bits_per_copy=bits)

    def _store_atom(self):
        hint = dict(store_cache_mode=StoreCacheMode.STREAMING) if self._streams() else {}
        bits = self.spec.vector * self.dtype.width
        return cute.make_copy_atom(CopyR2GOp(), self.dtype, num_bits_per_copy=bits, **hint)

    def _load_x(self, smem, mX, rows, col, inside, tidx):
        """Start loading this thread's part of each row; where they will be. Vectors outside the row are zero."""
        t, atom, held = self.tile, self._load_atom(), []
        for row in rows:
            # a row past the end is loaded as the last one, so that no load needs a test; it is not stored
            at = row if self._whole_grid() else cutlass.min(row, mX.shape[0] - 1)
            source = self._view(mX, (at, col))
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

    def _forget(self):
        """Between two passes over shared memory: or the compiler keeps what the first one read, as fp32."""
        if self.config.load == "shared":
            cute.arch.sync_warp()

    def _packed(self, y):
        packed = cute.make_rmem_tensor(self.tile.vector, self.dtype)
        packed.store(y.to(self.dtype))
        return packed

    def _store(self, mO, rows, col, inside, r, j, packed):
        """Vector j of the r-th row."""
        stored = inside[j] if self._whole_grid() else _both(inside[j], rows[r] < mO.shape[0])
        self._put(self._store_atom(), packed, self._view(mO, (rows[r], col))[None, j], stored)

    def _vectors(self, m, col, inside):
        """All of this thread's elements of weight or bias, if they are to come early."""
        t = self.tile
        if m is None or not self.config.early:
            return None
        source, held = self._view(m, (col,)), cute.make_rmem_tensor((t.vector, t.blocks), m.element_type)
        for j in range(t.blocks):
            self._fetch(self._vector_atom(m), source[None, j], held[None, j], inside[j])
        return held

    def _vector(self, held, m, col, inside, j):
        """Vector j of weight or bias, as fp32; None where there is none."""
        if m is None:
            return None
        if held is not None:
            return held[None, j].load().to(Float32)
        one = cute.make_rmem_tensor(self.tile.vector, m.element_type)
        self._fetch(self._vector_atom(m), self._view(m, (col,))[None, j], one, inside[j])
        return one.load().to(Float32)

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


def _both(a, b):
    if a is True or b is True:
        return b if a is True else a
    return a & b
