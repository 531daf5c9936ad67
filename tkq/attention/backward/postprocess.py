"""After attention's backward: dQ from the fp32 accumulator."""
from typing import Any, Optional

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.common.sequences import stores, tile_order


class BackwardPostprocess:
    """dq = scale * acc, rounded. One warpgroup a part of 64 rows x ``dq_cols``."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        self.config, self.parts = config, config.dq_parts(spec.width)
        self.out = tk.st(64, config.dq_cols, tk.element_type(spec.dtype))

    @cute.jit
    def __call__(self, acc: cute.Tensor, dq: cute.Tensor, layout: Any, scale: Float32, first, stream: cuda.CUstream,
                 added: Optional[cute.Tensor] = None):
        """acc: (tiles of all heads, floats of a tile), dq ([B,] Sq, H, D). first: tile; those before it are made.
        added: of each tile, how many blocks of keys are in it; where none is, acc holds nothing, and dq is 0."""
        self.kernel(acc, stores(dq, self.out, layout.ragged), layout, dq.shape[-2], scale, added).launch(
            grid=[cute.size(acc, mode=[0]) - first, 1, 1], block=[tk.WARPGROUP * self.parts[0] * self.parts[1], 1, 1],
            stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, acc: cute.Tensor, dq: tk.gl, layout: Any, heads: Int32, scale: Float32,
               added: Optional[cute.Tensor]):
        # the last heads first: they are in L2
        n, part = cute.size(acc, mode=[0]) - Int32(cute.arch.block_idx()[0]) - 1, tk.warpgroup_id()
        out = tk.SharedAllocator().tile(self.out, self.parts[0] * self.parts[1])[part]
        at = layout.at(False, self.config.tile, *tile_order(layout, self.config.tile, n, heads))
        cute.arch.griddepcontrol_wait()
        if const_expr(layout.ragged):
            if at.number * self.config.tile < at.rows_q:  # else the slot has no row
                self.convert(acc[Int64(n), None], dq.part(at.rows_q), out, at, part, scale, self.is_there(added, n))
        else:
            self.convert(acc[Int64(n), None], dq, out, at, part, scale, self.is_there(added, n))

    def is_there(self, added, n):
        """Has anything been added up for tile n? None: always."""
        return None if added is None else added[n] > 0

    @cute.jit
    def convert(self, acc, dq, out, at, part, scale, there):
        rows, cols = self.parts
        x = tk.rt_fl(self.config.dq_cols)
        load_part(x, acc, part)
        if const_expr(there is not None):
            if not there:
                tk.zero(x)
        tk.mul(x, x, scale)
        tk.store(out, x)
        tk.publish()
        tk.sync(1 + part, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(dq, out, (at.batch_q, at.head, at.number * rows + part // cols, part % cols))
            tk.store_wait()


def load_part(x, tile, part):
    """x, 64 rows of dQ, from part ``part`` of an accumulator's tile, in its order (see ``DqTile``). From L2,
    where it was added up."""
    quads = x.cols // 8
    mine = cute.make_tensor(x.tensor.iterator, cute.make_layout((4, quads)))
    start = (tile.iterator + part * (x.cols * 64)).align(16)
    theirs = cute.make_tensor(start, cute.make_layout((4, 32, quads, 4)))[None, None, None, tk.warp_id() % 4]
    atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), Float32, num_bits_per_copy=128,
                               load_cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL)
    for j in range(quads):
        cute.copy(atom, theirs[None, tk.lane_id(), j], mine[None, j])
