"""From the losses of rows to one: their sum, or their weighted mean; in a fixed order, by one cluster."""
import operator
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from .. import tile as tk
from ..reduction_base import ReductionBase
from ..runtime.compile import fake
from ..utils import collect, lanes_used, pack_f32x2, publish, unpack_f32x2, warp_reduce
from .arguments import vector

IN_FLIGHT = 8  # rows of a thread whose loads are in flight together


class Total(ReductionBase):
    """loss = sum(losses) / sum(weights of the targets), inverse = 1 / that sum; a part of it, by ReduceSpec.

    Thread i of the cluster's n takes rows i, i + n, ..; then warps, then blocks exchange their two sums. All of it
    starts when the kernel before it has ended: its launch lies under that one's end.
    """

    def __init__(self, spec, config):
        super().__init__(Float32, config.threads * config.cluster, 1, Int64)
        self.spec, self.config = spec, config

    def fake_arguments(self):
        """Compiled for losses, targets, class weights, loss (), 1 / the weights' sum (2,), ignore_index; None for what
        the spec does not have."""
        spec, rows = self.spec, fake.sym()
        losses = vector("fp32", rows) if spec.losses else None
        target = vector(spec.target, rows) if spec.mean else None
        weight = vector(spec.weight, fake.sym()) if spec.mean and spec.weight else None
        return (losses, target, weight, fake.scalar("fp32") if spec.losses else None,
                vector("fp32", 2) if spec.mean else None, Int64(0))

    def _calculate_threads_per_row(self):
        return self.config.threads

    def _get_num_threads(self):
        return self.config.threads

    def _set_cluster_n(self):
        self.cluster_n = self.config.cluster

    @cute.jit
    def __call__(self, mLosses: Optional[cute.Tensor], mT: Optional[cute.Tensor], mW: Optional[cute.Tensor],
                 mLoss: Optional[cute.Tensor], mInverse: Optional[cute.Tensor], ignore_index: Int64,
                 stream: cuda.CUstream):
        """mLosses, mT: (M,); mW: (N,); mLoss: (); mInverse: its first element. None for what the spec does not have."""
        self._set_cluster_n()
        _, tv_layout = self._get_tv_layout(32)
        self.kernel(mLosses, mT, mW, mLoss, mInverse, ignore_index, tv_layout).launch(
            grid=[1, self.cluster_n, 1], block=[self.config.threads, 1, 1],
            cluster=[1, self.cluster_n, 1] if const_expr(self.cluster_n > 1) else None, stream=stream,
            use_pdl=self.config.pdl)

    @cute.kernel
    def kernel(self, mLosses: Optional[cute.Tensor], mT: Optional[cute.Tensor], mW: Optional[cute.Tensor],
               mLoss: Optional[cute.Tensor], mInverse: Optional[cute.Tensor], ignore_index: Int64,
               tv_layout: cute.Layout):
        thread, _, _ = cute.arch.thread_idx()
        _, rank, _ = cute.arch.block_idx()
        buffer, mbar_ptr = self._allocate_reduction_buffer_and_mbar(tk.SharedAllocator(), tv_layout)
        self._initialize_cluster(thread, mbar_ptr, self.config.threads // 32)
        cute.arch.griddepcontrol_wait()
        total, weight = self.mine(mLosses, mT, mW, ignore_index, rank * self.config.threads + thread)
        total, weight = (warp_reduce(x, operator.add) for x in (total, weight))
        if const_expr(self.cluster_n > 1):
            tk.cluster_wait()
        publish(pack_f32x2(total, weight), buffer[None, None, 0], mbar_ptr)
        parts = collect(buffer[None, None, 0], pack_f32x2(Float32(0), Float32(0)))
        pairs = [unpack_f32x2(parts[i]) for i in range(cute.size(parts))]
        lanes = lanes_used(cute.size(buffer, mode=[1]))
        total, weight = (warp_reduce(sum(x[1:], x[0]), operator.add, lanes) for x in zip(*pairs))
        if rank == 0 and thread == 0:
            self.put(mLoss, mInverse, total, weight)

    def put(self, mLoss, mInverse, total, weight):
        """By one thread."""
        if mInverse is not None:
            mInverse[0] = 1.0 / weight
        if mLoss is not None:
            mLoss[()] = total / weight if self.spec.mean else total

    @cute.jit
    def mine(self, mLosses: Optional[cute.Tensor], mT: Optional[cute.Tensor], mW: Optional[cute.Tensor], ignore_index,
             first):
        """This thread's rows: (sum of losses, sum of weights)."""
        rows = cute.size(mLosses if const_expr(self.spec.losses) else mT)
        step = self.config.threads * self.config.cluster
        total, weight = Float32(0), Float32(0)
        for row in cutlass.range(first, rows, step, unroll=IN_FLIGHT):
            if const_expr(self.spec.losses):
                total += mLosses[row]
            if const_expr(self.spec.mean):
                weight += self.weight(mT, mW, ignore_index, row)
        return total, weight

    @cute.jit
    def weight(self, mT: cute.Tensor, mW: Optional[cute.Tensor], ignore_index, row):
        """Of a row: its class's, 0 if it is ignored, NaN if it is no class and there are class weights."""
        target = Int64(mT[row])
        found = Float32(1)
        if const_expr(mW is not None):
            known = (target >= 0) & (target < mW.shape[0])
            found = Float32.nan
            if known:
                found = mW[cutlass.Int32(target)].to(Float32)
        return cutlass.select_(target == ignore_index, Float32(0), found)
