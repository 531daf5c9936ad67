"""RowNorm: the one-pass kernel of rmsnorm and layernorm, on ReductionBase. A row stays on the chip.

A thread holds `blocks` vectors of a row, of `rows_per_thread` rows at once. It starts all its loads before it waits for
any. The kernel is composed of two parts, which `kernel` chooses:

  norm     RMSNorm | LayerNorm | LayerNormMultiRow: a row's statistics, and an element's normalised value
  output   Output | Fp8Output: the results, and their way to memory
"""
from dataclasses import dataclass
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import CopyG2ROp

from ... import tile as tk
from ...reduction_base import ReductionBase
from ...rows.one_pass.columns import Columns
from ...rows.one_pass.copies import RowCopies, both, floats
from ...utils import domain_offset_i64


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


class Row(NamedTuple):
    """One thread's part of a row: of x, and of the residual where there is one, (vector, blocks) in registers or shared
    memory; which vectors are within the row; which block of the cluster this is; for each exchange its buffer and
    mbarrier (None in a single block)."""

    data: tuple
    inside: tuple
    rank: Int32
    buffers: tuple
    mbar_ptrs: tuple

    buffer = property(lambda self: self.buffers[0])
    mbar_ptr = property(lambda self: self.mbar_ptrs[0])

    def block(self, j):
        """Vector j, as fp32: x, or x + residual."""
        parts = [floats(held[None, j]) for held in self.data]
        return parts[0] + parts[1] if len(parts) == 2 else parts[0]


@dataclass(frozen=True)
class Operands:
    """The tensors of a launch. x, residual: (M, N), or (R, H, N) with M = R * H where rows lie two strides apart.
    weight, bias: (N,), weight also (H, N). out, total: (M, N). rstd, mean: (M,). scale: (M, 1) or (M, groups)."""

    x: cute.Tensor
    weight: Optional[cute.Tensor]
    bias: Optional[cute.Tensor]
    out: cute.Tensor
    residual: Optional[cute.Tensor] = None
    total: Optional[cute.Tensor] = None
    rstd: Optional[cute.Tensor] = None
    mean: Optional[cute.Tensor] = None
    scale: Optional[cute.Tensor] = None

    @property
    def rows(self):
        """How many there are."""
        return self.x.shape[0] if len(self.x.shape) == 2 else self.out.shape[0]


class Affine(NamedTuple):
    """Where in weight and bias this thread's part begins; the part, if it came early; what is added to the weight."""

    coord: tuple
    weight: Optional[cute.Tensor]
    bias: Optional[cute.Tensor]
    offset: Optional[Float32]


class RowNorm(ReductionBase):
    """norm has three methods: `exchanged(spec)`, the type of what warps exchange; `statistics(kernel, rows, eps)`, for
    each row and each of `RowNorm.seen` a (shift, scale), in every thread of the row; `normalise(x, statistics)`. The
    first row's statistics wait for the cluster before they are exchanged. output: see `Output`."""

    def __init__(self, spec, config, norm, output):
        super().__init__(tk.element_type(spec.x), spec.N, config.rows_per_thread * spec.exchanges, norm.exchanged(spec))
        self.spec, self.config, self.norm, self.output = spec, config, norm, output
        self._set_cluster_n()
        self.tile = self._get_tile(spec.vector * self.dtype.width)
        past_l1 = config.load == "shared" and not config.split
        self.copies = RowCopies(Columns(self.tile, self.N), config.load, past_l1)

    def _calculate_threads_per_row(self):
        return self.config.threads_per_row

    def _get_num_threads(self):
        return self.config.threads

    def _set_cluster_n(self):
        self.cluster_n = self.config.cluster

    @cute.jit
    def launch(self, g: Operands, eps: Float32, offset: Optional[Float32], stream: cuda.CUstream):
        (tile_rows, _), tv_layout = self._get_tv_layout(self.spec.vector * self.dtype.width)
        heads = None
        if const_expr(self.spec.heads is not None):
            heads = cute.fast_divmod_create_divisor_v2(g.x.shape[1])
        self.kernel(g, eps, offset, heads, tv_layout).launch(
            grid=[cute.ceil_div(g.rows, tile_rows * self.config.rows_per_thread), self.cluster_n, 1],
            block=[self.tile.threads, 1, 1],
            cluster=[1, self.cluster_n, 1] if const_expr(self.cluster_n > 1) else None,
            stream=stream, min_blocks_per_mp=self.config.min_blocks_per_sm,
            preferred_smem_carveout=100 if const_expr(self.config.min_blocks_per_sm > 0) else None)

    @cute.kernel
    def kernel(self, g: Operands, eps: Float32, offset: Optional[Float32], heads, tv_layout: cute.Layout):
        t, config = self.tile, self.config
        tidx, _, _ = cute.arch.thread_idx()
        _, rank, _ = cute.arch.block_idx()
        smem = tk.SharedAllocator()
        buffer, mbar_ptr = self._allocate_reduction_buffer_and_mbar(smem, tv_layout)
        self._initialize_cluster(tidx, mbar_ptr, t.threads // 32)

        col = self.copies.columns.first(tidx, rank)
        mine = Mine(tidx, col, self.copies.columns.inside(col), self._places(tidx, g.rows, heads), smem)
        held = [self._load_row(g, place, mine) for place in mine.places]
        if const_expr(config.load == "shared"):
            cute.arch.cp_async_commit_group()
        affine = self._affine(g, mine, offset)
        if const_expr(config.load == "shared"):
            cute.arch.cp_async_wait_group(0)
        parts = [self._row(data, r, rank, mine, buffer, mbar_ptr) for r, data in enumerate(held)]
        if const_expr(g.total is not None):
            self._store_total(g.total, parts, mine)
        statistics = self.norm.statistics(self, parts, eps)
        if const_expr(g.rstd is not None):
            self._store_statistics(g, mine, [of_row[-1] for of_row in statistics])
        self.copies.forget()
        self.output.finish(self, g, parts, mine, [of_row[0] for of_row in statistics], affine)

    # ---- where a thread's elements are ------------------------------------------------------------

    def _places(self, tidx, count, heads):
        """The rows of this thread, of `count` in all. Those of one step of the block lie together."""
        t = self.tile
        first = cute.arch.block_idx()[0] * (t.rows * self.config.rows_per_thread)
        within = tidx // t.threads_per_row if t.rows > 1 else 0
        return [self._place(first + r * t.rows + within, count, heads) for r in range(self.config.rows_per_thread)]

    def _place(self, row, count, heads):
        # a row past the end is loaded as the last one, so that no load needs a test; it is not stored
        at = row if self._whole_grid() else cutlass.min(row, count - 1)
        if self.spec.heads is None:
            return Place(row, (at,))
        position, head = divmod(at, heads)
        return Place(row, (Int32(position), Int32(head)))

    def _whole_grid(self):
        """Does every thread of the grid have rows, whatever M is?"""
        return self.tile.rows * self.config.rows_per_thread == 1

    def _load(self, m, place, mine):
        """Start loading this thread's part of a row of m; where it will be. Vectors outside the row are zero."""
        return self.copies.fetch_row(m, (*place.at, mine.col), mine.inside, mine.smem, mine.tidx)

    # ---- weight and bias ------------------------------------------------------------------------------

    def _vectors(self, m, coord, inside):
        """All of this thread's elements of weight or bias, if they are to come early."""
        t = self.tile
        if m is None or not self.config.prefetch_weight:
            return None
        source, held = self.copies.view(m, coord), cute.make_rmem_tensor((t.vector, t.blocks), m.element_type)
        for j in range(t.blocks):
            self.copies.fetch(_vector_atom(self, m), source[None, j], held[None, j], inside[j])
        return held

    def _vector(self, held, m, coord, inside, j):
        """Vector j of weight or bias, as fp32; None where there is none."""
        if m is None:
            return None
        return held[None, j].load().to(Float32) if held is not None else vector_of(self, m, coord, inside, j)

    # ---- stores ---------------------------------------------------------------------------------------

    def store(self, m, place, mine, packed, j):
        """Vector j of a row of m (M, N)."""
        stored, copies = self._within(mine.inside[j], place, m), self.copies
        copies.put(copies.store_atom(m), packed, copies.view(m, (place.row, mine.col))[None, j], stored)

    def store_scalar(self, m, place, value, chosen, *column):
        """m[row, *column] = value, by the chosen threads."""
        self._put_scalar(domain_offset_i64((place.row, *column), m), value, self._within(chosen, place, m))

    def _within(self, condition, place, m):
        """condition, and the row is one of m's."""
        return condition if self._whole_grid() else both(condition, place.row < m.shape[0])

    @cute.jit
    def _put_scalar(self, dst: cute.Tensor, value: Float32, stored):
        if stored:
            dst[(0,) * len(dst.shape)] = value

    # ---- the parts of the kernel -------------------------------------------------------------------

    def _load_row(self, g, place, mine):
        return tuple(self._load(m, place, mine) for m in (g.x, g.residual) if m is not None)

    def _row(self, data, r, rank, mine, buffer, mbar_ptr):
        stages = [e * self.config.rows_per_thread + r for e in range(self.spec.exchanges)]
        return Row(data, mine.inside, rank, tuple(buffer[None, None, s] for s in stages),
                   tuple(mbar_ptr + s if self.cluster_n > 1 else None for s in stages))

    def seen(self, row, j):
        """Vector j, as fp32, as the result is computed from it; and as a backward pass reads it, if it was rounded."""
        x = row.block(j)
        return (x, self.rounded(x)) if self.spec.rounded else (x,)

    def rounded(self, x):
        """fp32 as the sum is stored."""
        return x.to(tk.element_type(self.spec.total)).to(Float32)

    def _affine(self, g, mine, offset):
        """What the results are scaled and shifted by: for each row, or one for all rows that share it."""
        coords = [(place.at[1], mine.col) for place in mine.places] if self.spec.heads == "weight" else [(mine.col,)]
        return [Affine(coord, *(self._vectors(m, coord, mine.inside) for m in (g.weight, g.bias)), offset)
                for coord in coords]

    def affine_of(self, g, affine, inside, j):
        """(weight, bias) of vector j as fp32, None where there is none; for each of the thread's rows."""
        found = []
        for a in affine:
            w = self._vector(a.weight, g.weight, a.coord, inside, j)
            b = self._vector(a.bias, g.bias, a.coord, inside, j)
            found.append((w if a.offset is None else w + a.offset, b))
        return found if len(found) > 1 else found * self.config.rows_per_thread

    def result(self, part, j, statistics, affine):
        """Vector j of the row's result, as fp32."""
        w, b = affine
        y = self.norm.normalise(part.block(j), statistics)
        if w is not None:
            y = y * w
        return y if b is None else y + b

    def _store_total(self, total, parts, mine):
        for place, part in zip(mine.places, parts, strict=True):
            for j in range(self.tile.blocks):
                self.store(total, place, mine, self.copies.packed(part.block(j), total), j)
        self.copies.forget()

    def _store_statistics(self, g, mine, statistics):
        for place, (mean, rstd) in zip(mine.places, statistics, strict=True):
            self.store_scalar(g.rstd, place, rstd, mine.col == 0)
            if g.mean is not None:
                self.store_scalar(g.mean, place, mean, mine.col == 0)


def vector_of(kernel, m, coord, inside, j):
    """Vector j of a thread's part of weight or bias, which begins at `coord`, loaded where it is used; as fp32."""
    one = cute.make_rmem_tensor(kernel.tile.vector, m.element_type)
    kernel.copies.fetch(_vector_atom(kernel, m), kernel.copies.view(m, coord)[None, j], one, inside[j])
    return one.load().to(Float32)


def _vector_atom(kernel, m):
    bits = min(128, kernel.spec.vector * m.element_type.width)
    return cute.make_copy_atom(CopyG2ROp(), m.element_type, num_bits_per_copy=bits)


class Output:
    """A part of RowNorm: results in x's type or another, each stored when it is there, or with `Config.split` all at
    the end."""

    def finish(self, kernel, g, parts, mine, statistics, affine):
        """Compute the results and store them."""
        results = []
        for j in range(kernel.tile.blocks):
            affine_j = kernel.affine_of(g, affine, mine.inside, j)
            for r, part in enumerate(parts):
                y = kernel.result(part, j, statistics[r], affine_j[r])
                results.append((g.out, mine.places[r], mine, kernel.copies.packed(y, g.out), j))
                if not kernel.config.split:
                    kernel.store(*results.pop())
        if kernel.config.split:
            cute.arch.sync_warp()  # or the compiler moves each store up to where its result is computed
            for result in results:
                kernel.store(*result)
