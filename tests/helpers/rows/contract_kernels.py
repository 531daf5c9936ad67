"""An RMSNorm and a LayerNorm written as the public CuTe-DSL reduction tutorial writes its kernels.

They stand for code from elsewhere: only the two tkq imports would differ there. Nothing of tkq.norms is used.
"""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.utils as utils
from tkq.reduction_base import ReductionBase


def _expand(vector, rows):
    """(N,) as (rows, N) with stride 0."""
    return cute.make_tensor(vector.iterator, cute.prepend(vector.layout, cute.make_layout((rows,), stride=(0,))))


class _Norm(ReductionBase):
    """Ladders of the tutorial's kind, the launch, and the parts of the kernel that both have in common."""

    def __init__(self, dtype, N: int, stage: int, cluster_n: Optional[int] = None, reload_from: Optional[str] = None):
        super().__init__(dtype, N, stage=stage)
        self.wanted = cluster_n
        self.reload_from = reload_from if reload_from or N <= 16384 else "smem"

    def _calculate_threads_per_row(self):
        N = self.N
        ladder = ((64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128), (N, 256))
        return next(threads for limit, threads in ladder if limit >= N)

    def _set_cluster_n(self):
        bytes_ = self.N * self.dtype.width // 8
        self.cluster_n = self.wanted or (1 if bytes_ <= 32768 else 2 if bytes_ <= 65536 else 4 if bytes_ <= 131072 else
                                         8 if bytes_ <= 262144 else 16)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mO: cute.Tensor, mRstd: Optional[cute.Tensor], eps: Float32,
                 stream: cuda.CUstream):
        assert mX.element_type == self.dtype
        self._set_cluster_n()
        tiler_mn, tv_layout = self._get_tv_layout()
        num_threads = cute.size(tv_layout, mode=[0])
        mW = _expand(mW, tiler_mn[0])
        self.kernel(mX, mW, mO, mRstd, eps, tv_layout, tiler_mn, self.reload_from).launch(
            grid=[cute.ceil_div(mX.shape[0], tiler_mn[0]), self.cluster_n, 1],
            block=[num_threads, 1, 1],
            cluster=[1, self.cluster_n, 1] if const_expr(self.cluster_n > 1) else None,
            smem=self._smem_size_in_bytes(tiler_mn, num_threads // cute.arch.WARP_SIZE),
            stream=stream,
        )


class RMSNorm(_Norm):
    def __init__(self, dtype, N: int, **options):
        super().__init__(dtype, N, stage=1, **options)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, mO: cute.Tensor, mRstd: Optional[cute.Tensor], eps: Float32,
               tv_layout: cute.Layout, tiler_mn: cute.Shape, reload_from: cutlass.Constexpr):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, cluster_y, _ = cute.arch.block_idx()
        if const_expr(self.cluster_n == 1):
            cluster_y = const_expr(0)
        smem = cutlass.memory.SmemAllocator()
        sX = smem.allocate_tensor(mX.element_type, cute.make_ordered_layout(tiler_mn, order=(1, 0)), byte_alignment=16)
        reduction_buffer, mbar_ptr = self._allocate_reduction_buffer_and_mbar(smem, tv_layout)

        shape = mX.shape
        idX = cute.make_identity_tensor(shape)
        mX, mO = [utils.domain_offset_i64((bidx * tiler_mn[0], 0), mT) for mT in (mX, mO)]
        gX, gO = [cute.local_tile(mT, tiler_mn, (0, cluster_y)) for mT in (mX, mO)]
        cX = cute.local_tile(idX, tiler_mn, (bidx, cluster_y))
        gW = cute.local_tile(mW, tiler_mn, (0, cluster_y))

        vecsize = tv_layout.shape[1][0]
        bits = vecsize * mX.element_type.width
        load = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), mX.element_type, num_bits_per_copy=bits)
        again = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), mX.element_type, num_bits_per_copy=bits)
        load_w = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), mW.element_type,
                                     num_bits_per_copy=min(128, vecsize * mW.element_type.width))
        thr = cute.make_tiled_copy(load, tv_layout, tiler_mn).get_slice(tidx)
        tXgX, tXgW, tXsX, tXgO = thr.partition_S(gX), thr.partition_S(gW), thr.partition_D(sX), thr.partition_D(gO)
        tXcX = thr.partition_S(cX)
        tXrX, tXrW, tXrO = [cute.make_rmem_tensor_like(t) for t in (tXgX, tXgW, tXgO)]
        tXrW.fill(0.0)

        self._initialize_cluster(tidx, mbar_ptr, cute.size(tv_layout, mode=[0]) // cute.arch.WARP_SIZE)
        tXpX = utils.predicate_k(tXcX, limit=shape[1])
        row = tXcX[(0, 0), 0, 0][0]
        if row < shape[0]:
            cute.copy(load, tXgX, tXsX, pred=tXpX)
        cute.arch.cp_async_commit_group()
        cute.copy(load_w, tXgW, tXrW, pred=tXpX)
        cute.arch.cp_async_wait_group(0)
        utils.fill_oob(tXsX, tXpX, 0.0)
        cute.autovec_copy(tXsX, tXrX)
        x = tXrX.load().to(Float32)
        sum_sq_x = utils.row_reduce(
            x * x, cute.ReductionOp.ADD, tv_layout.shape[0][0], reduction_buffer[None, None, 0], mbar_ptr, init_val=0.0,
            hook_fn=cute.arch.cluster_wait if const_expr(self.cluster_n > 1) else None)
        rstd = utils.rsqrt(sum_sq_x / shape[1] + eps)
        if const_expr(mRstd is not None):
            if tXcX[(0, 0), 0, 0][1] == 0 and row < shape[0]:
                mRstd[row] = rstd
        if const_expr(reload_from == "smem"):
            cute.autovec_copy(tXsX, tXrX)
            x = tXrX.load().to(Float32)
        elif const_expr(reload_from == "gmem"):
            if row < shape[0]:
                cute.copy(again, tXgX, tXrX, pred=tXpX)
            x = tXrX.load().to(Float32)
        tXrO.store((x * rstd * tXrW.load().to(Float32)).to(tXrO.element_type))
        if row < shape[0]:
            cute.copy(again, tXrO, tXgO, pred=tXpX)


class RMSNormStreamFirst(RMSNorm):
    """The stream before eps, which has a default: the tutorial's own order."""

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: cute.Tensor, mO: cute.Tensor, mRstd: Optional[cute.Tensor],
                 stream: cuda.CUstream, eps: Float32 = 1e-6):
        _Norm.__call__(self, mX, mW, mO, mRstd, eps, stream)


class LayerNorm(_Norm):
    def __init__(self, dtype, N: int, **options):
        super().__init__(dtype, N, stage=2, **options)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mW: cute.Tensor, mO: cute.Tensor, mRstd: Optional[cute.Tensor], eps: Float32,
               tv_layout: cute.Layout, tiler_mn: cute.Shape, reload_from: cutlass.Constexpr):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, cluster_y, _ = cute.arch.block_idx()
        if const_expr(self.cluster_n == 1):
            cluster_y = const_expr(0)
        smem = cutlass.memory.SmemAllocator()
        sX = smem.allocate_tensor(mX.element_type, cute.make_ordered_layout(tiler_mn, order=(1, 0)), byte_alignment=16)
        reduction_buffer, mbar_ptr = self._allocate_reduction_buffer_and_mbar(smem, tv_layout)

        shape = mX.shape
        idX = cute.make_identity_tensor(shape)
        gX, gO, cX = [cute.local_tile(mT, tiler_mn, (bidx, cluster_y)) for mT in (mX, mO, idX)]
        gW = cute.local_tile(mW, tiler_mn, (0, cluster_y))
        vecsize = tv_layout.shape[1][0]
        bits = vecsize * mX.element_type.width
        load = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), mX.element_type, num_bits_per_copy=bits)
        load_w = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), mW.element_type,
                                     num_bits_per_copy=min(128, vecsize * mW.element_type.width))
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), mO.element_type, num_bits_per_copy=bits)
        thr = cute.make_tiled_copy(load, tv_layout, tiler_mn).get_slice(tidx)
        tXgX, tXgW, tXsX, tXgO = thr.partition_S(gX), thr.partition_S(gW), thr.partition_D(sX), thr.partition_D(gO)
        tXcX = thr.partition_S(cX)
        tXrX, tXrW, tXrO = [cute.make_rmem_tensor_like(t) for t in (tXgX, tXgW, tXgO)]
        tXrW.fill(0.0)

        self._initialize_cluster(tidx, mbar_ptr, cute.size(tv_layout, mode=[0]) // cute.arch.WARP_SIZE)
        tXpX = utils.predicate_k(tXcX, limit=shape[1])
        row = tXcX[(0, 0), 0, 0][0]
        if row < shape[0]:
            cute.copy(load, tXgX, tXsX, pred=tXpX)
        cute.arch.cp_async_commit_group()
        cute.copy(load_w, tXgW, tXrW, pred=tXpX)
        cute.arch.cp_async_wait_group(0)
        utils.fill_oob(tXsX, tXpX, 0.0)
        cute.autovec_copy(tXsX, tXrX)
        x = tXrX.load().to(Float32)
        threads_per_row = tv_layout.shape[0][0]
        mean = utils.row_reduce(
            x, cute.ReductionOp.ADD, threads_per_row, reduction_buffer[None, None, 0],
            mbar_ptr + 0 if const_expr(self.cluster_n > 1) else None, init_val=0.0,
            hook_fn=cute.arch.cluster_wait if const_expr(self.cluster_n > 1) else None) / shape[1]
        if const_expr(reload_from == "smem"):
            cute.autovec_copy(tXsX, tXrX)
            x = tXrX.load().to(Float32)
        centred = cute.make_rmem_tensor_like(tXrX, Float32)
        centred.store(x - mean)
        utils.fill_oob(centred, tXpX, 0.0)
        d = centred.load()
        variance = utils.row_reduce(
            d * d, cute.ReductionOp.ADD, threads_per_row, reduction_buffer[None, None, 1],
            mbar_ptr + 1 if const_expr(self.cluster_n > 1) else None, init_val=0.0) / shape[1]
        rstd = utils.rsqrt(variance + eps)
        if const_expr(mRstd is not None):
            if tXcX[(0, 0), 0, 0][1] == 0 and row < shape[0]:
                mRstd[row] = rstd
        tXrO.store((d * rstd * tXrW.load().to(Float32)).to(tXrO.element_type))
        if row < shape[0]:
            cute.copy(store, tXrO, tXgO, pred=tXpX)
