"""A user-defined forward reduction, on both base classes: the mean of each row, weighted by its softmax.

mean[row] = sum(softmax(x) * x): the maximum, then two sums about it; one number a row is written. The kernels of
bench.ops.row_forward and of the tests of default plans; none of them is tuned by hand.
"""
import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from tkq import tile as tk
from tkq import utils
from tkq.reduction.geometry import cluster
from tkq.reduction_base import ReductionBase
from tkq.rows.persistent.kernel import RowKernel
from tkq.rows.persistent.monoid import MAXIMUM, Exchange, add

LOG2E = math.log2(math.e)


class SoftmaxMean(RowKernel):
    """x (M, N) finite, mean (M,) fp32: two exchanges a row."""

    loads, results = ("x",), ("mean",)
    exchanges = (Exchange(MAXIMUM), Exchange(add(2), "weighted", "finish"))

    def partial(self, e, r):
        return (e.x,)

    def row(self, sums, r):
        return dict(top=sums[0])

    def weighted(self, e, r):
        weight = cute.math.exp2((e.x - r.top) * LOG2E, fastmath=True)
        return weight, weight * e.x

    def finish(self, sums, r):
        return dict(mean=sums[1] / sums[0])


class SoftmaxScaled(SoftmaxMean):
    """y = softmax(x) * x, and its sum: a forward that stores rows too."""

    stores = ("y",)

    def finish(self, sums, r):
        inverse = 1.0 / sums[0]
        return dict(inverse=inverse, mean=sums[1] * inverse)

    def write(self, e, r):
        return dict(y=cute.math.exp2((e.x - r.top) * LOG2E, fastmath=True) * e.x * r.inverse)


class SoftmaxMeanInOnePass(ReductionBase):
    """The same on ReductionBase: one block for each tile, a thread holds its part of the row in registers."""

    def __init__(self, dtype, N):
        super().__init__(dtype, N, stage=3)

    def _set_cluster_n(self):
        self.cluster_n = cluster(self.N, self.dtype.width)

    @cute.jit
    def __call__(self, x: cute.Tensor, mean: cute.Tensor, stream: cuda.CUstream):
        self._set_cluster_n()
        tiler, tv = self._get_tv_layout()
        self.kernel(x, mean, tv, tiler).launch(
            grid=[cute.ceil_div(x.shape[0], tiler[0]), self.cluster_n, 1], block=[cute.size(tv, mode=[0]), 1, 1],
            cluster=[1, self.cluster_n, 1] if const_expr(self.cluster_n > 1) else None, stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, mean: cute.Tensor, tv: cute.Layout, tiler: cute.Shape):
        thread, _, _ = cute.arch.thread_idx()
        block, part, _ = cute.arch.block_idx()
        part = part if const_expr(self.cluster_n > 1) else 0
        smem = tk.SharedAllocator()
        buffer, barriers = self._allocate_reduction_buffer_and_mbar(smem, tv)
        self._initialize_cluster(thread, barriers, cute.size(tv, mode=[0]) // 32)
        group = tv.shape[0][0]
        bits = tv.shape[1][0] * self.dtype.width
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=bits)
        mine = cute.make_tiled_copy(atom, tv, tiler).get_slice(thread)
        coords = mine.partition_S(cute.local_tile(cute.make_identity_tensor(x.shape), tiler, (block, part)))
        source = mine.partition_S(cute.local_tile(utils.domain_offset_i64((block * tiler[0], 0), x), tiler, (0, part)))
        row, inside = coords[0][0], utils.predicate_k(coords, x.shape[1])
        held = cute.make_rmem_tensor_like(source)
        held.fill(-self.dtype.inf)
        if row < x.shape[0]:
            cute.copy(atom, source, held, pred=inside)
        wide = held.load().to(Float32)
        top = self.reduce(wide, cute.ReductionOp.MAX, group, buffer, barriers, 0, -Float32.inf)
        weight = cute.math.exp2((wide - top) * LOG2E, fastmath=True)
        total = self.reduce(weight, cute.ReductionOp.ADD, group, buffer, barriers, 1, 0.0)
        utils.fill_oob(held, inside, 0.0)  # 0 times -inf is NaN
        weighted = self.reduce(weight * held.load().to(Float32), cute.ReductionOp.ADD, group, buffer, barriers, 2, 0.0)
        if coords[0][1] == 0 and row < x.shape[0]:
            mean[row] = weighted / total

    def reduce(self, e, op, group, buffer, barriers, stage: cutlass.Constexpr, init):
        clustered = self.cluster_n > 1  # its blocks meet once, before the first exchange
        return utils.row_reduce(e, op, group, buffer[None, None, stage], barriers + stage if clustered else None,
                                init_val=init, hook_fn=tk.cluster_wait if clustered and stage == 0 else None)
