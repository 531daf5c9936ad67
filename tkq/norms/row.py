"""RowNorm: what RMSNorm and LayerNorm share: a RowPass with a weight and a bias.

A subclass turns a row into two scalars (`statistics`) and an element into its normalised value (`normalise`).
"""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import CopyG2ROp

from .. import tile as tk
from ..row_pass import Row, RowPass


class RowNorm(RowPass):
    def __init__(self, spec, config, reduction_dtype=Float32):
        super().__init__(tk.element_type(spec.x), spec.N, spec.vector, config, reduction_dtype=reduction_dtype)
        self.spec = spec

    def statistics(self, row: Row, eps, first: bool):
        """(shift, scale) of the row, in every thread of it. The first one waits for the cluster before it exchanges."""
        raise NotImplementedError

    def normalise(self, x, statistics):
        raise NotImplementedError

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: Optional[cute.Tensor], mB: Optional[cute.Tensor], mO: cute.Tensor,
                 eps: Float32, stream: cuda.CUstream):
        """mX, mO: (M, N); mW, mB: (N,) or None."""
        tv_layout = self._layout()
        self.kernel(mX, mW, mB, mO, eps, tv_layout).launch(**self._launch_shape(mX.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: Optional[cute.Tensor], mB: Optional[cute.Tensor], mO: cute.Tensor,
               eps: Float32, tv_layout: cute.Layout):
        t, config = self.tile, self.config
        tidx, _, _ = cute.arch.thread_idx()
        _, rank, _ = cute.arch.block_idx()
        smem = tk.SharedAllocator()
        buffer, mbar_ptr = self._allocate_reduction_buffer_and_mbar(smem, tv_layout)
        self._initialize_cluster(tidx, mbar_ptr, t.threads // 32)

        col = self._column(tidx, rank)
        inside = self._inside(col)
        rows = self._rows(tidx)
        held = self._load(smem, mX, rows, col, inside, tidx)
        w, b = self._vectors(mW, col, inside), self._vectors(mB, col, inside)
        self._landed()
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
                    self._put_result(mO, rows, col, inside, *results.pop())
        if const_expr(config.split):
            cute.arch.sync_warp()  # or the compiler moves each store up to where its result is computed
            for result in results:
                self._put_result(mO, rows, col, inside, *result)

    def _put_result(self, mO, rows, col, inside, r, j, packed):
        self._store(mO, rows[r], col, inside, j, packed)

    def _past_l1(self):
        return super()._past_l1() and not self.config.split

    # ---- weight and bias ----------------------------------------------------------------------------

    def _vector_atom(self, m):
        bits = min(128, self.vector * m.element_type.width)
        return cute.make_copy_atom(CopyG2ROp(), m.element_type, num_bits_per_copy=bits)

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
