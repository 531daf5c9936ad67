"""Small kernels that show one piece of ReductionBase or tkq.utils each."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, const_expr

from tkq import tile as tk
from tkq import utils
from tkq.reduction.geometry import cluster
from tkq.reduction_base import ReductionBase

OPS = {"add": (cute.ReductionOp.ADD, 0.0), "max": (cute.ReductionOp.MAX, -Float32.inf),
       "min": (cute.ReductionOp.MIN, Float32.inf)}


class RowReduce(ReductionBase):
    """out[m] = op over x[m, :]; hooked[m] counts how often the hook ran in the row's first thread."""

    def __init__(self, dtype, N, op):
        super().__init__(dtype, N, stage=1)
        self.op = op

    def _set_cluster_n(self):
        self.cluster_n = cluster(self.N, self.dtype.width)

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, hooked: cute.Tensor, stream: cuda.CUstream):
        self._set_cluster_n()
        tiler, tv = self._get_tv_layout(self.copy_bits)
        self.kernel(x, out, hooked, tv, tiler).launch(
            grid=[cute.ceil_div(x.shape[0], tiler[0]), self.cluster_n, 1], block=[cute.size(tv, mode=[0]), 1, 1],
            cluster=[1, self.cluster_n, 1] if const_expr(self.cluster_n > 1) else None, stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, hooked: cute.Tensor, tv: cute.Layout, tiler: cute.Shape):
        thread, _, _ = cute.arch.thread_idx()
        block, part, _ = cute.arch.block_idx()
        part = part if const_expr(self.cluster_n > 1) else 0
        smem = tk.SharedAllocator()
        buffer, barriers = self._allocate_reduction_buffer_and_mbar(smem, tv)
        self._initialize_cluster(thread, barriers, cute.size(tv, mode=[0]) // 32)
        bits = tv.shape[1][0] * self.dtype.width
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=bits)
        mine = cute.make_tiled_copy(atom, tv, tiler).get_slice(thread)
        coords = mine.partition_S(cute.local_tile(cute.make_identity_tensor(x.shape), tiler, (block, part)))
        source = mine.partition_S(cute.local_tile(x, tiler, (block, part)))
        row = coords[0][0]
        op, neutral = OPS[self.op]
        held = cute.make_rmem_tensor_like(source)
        held.fill(neutral)
        if row < x.shape[0]:
            cute.copy(atom, source, held, pred=utils.predicate_k(coords, x.shape[1]))
        calls = cute.make_rmem_tensor(1, Float32)
        calls[0] = Float32(0)

        def hook():
            calls[0] = calls[0] + 1
            if self.cluster_n > 1:
                tk.cluster_wait()

        total = utils.row_reduce(held.load().to(Float32), op, tv.shape[0][0], buffer[None, None, 0], barriers,
                                 init_val=neutral, hook_fn=hook)
        if coords[0][1] == 0 and row < x.shape[0]:
            out[row] = total
            hooked[row] = calls[0]


class RowReduceAnywhere(RowReduce):
    """Of rows at any address of a float32."""

    copy_bits = 32


class WeightedSum(ReductionBase):
    """totals[m] = sum of x[m, :] * weight: reads a vector of N in the rows' layout, writes one number for each row."""

    def __init__(self, dtype, N):
        super().__init__(dtype, N, stage=1)

    def _set_cluster_n(self):
        self.cluster_n = cluster(self.N, self.dtype.width)

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, totals: cute.Tensor, stream: cuda.CUstream):
        self._set_cluster_n()
        tiler, tv = self._get_tv_layout()
        # row stride 0: every row of the tile is the vector
        rows = cute.make_layout((tiler[0],), stride=(0,))
        weight = cute.make_tensor(weight.iterator, cute.prepend(weight.layout, rows))
        self.kernel(x, weight, totals, tv, tiler).launch(
            grid=[cute.ceil_div(x.shape[0], tiler[0]), self.cluster_n, 1], block=[cute.size(tv, mode=[0]), 1, 1],
            cluster=[1, self.cluster_n, 1] if const_expr(self.cluster_n > 1) else None, stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, totals: cute.Tensor, tv: cute.Layout, tiler: cute.Shape):
        thread, _, _ = cute.arch.thread_idx()
        block, part, _ = cute.arch.block_idx()
        part = part if const_expr(self.cluster_n > 1) else 0
        smem = tk.SharedAllocator()
        buffer, barriers = self._allocate_reduction_buffer_and_mbar(smem, tv)
        self._initialize_cluster(thread, barriers, cute.size(tv, mode=[0]) // 32)

        atom, atom_w = [cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), t.element_type,
                                            num_bits_per_copy=min(128, tv.shape[1][0] * t.element_type.width))
                        for t in (x, weight)]
        mine = cute.make_tiled_copy(atom, tv, tiler).get_slice(thread)
        coords = mine.partition_S(cute.local_tile(cute.make_identity_tensor(x.shape), tiler, (block, part)))
        tile = cute.local_tile(utils.domain_offset_i64((block * tiler[0], 0), x), tiler, (0, part))
        gx, gw = mine.partition_S(tile), mine.partition_S(cute.local_tile(weight, tiler, (0, part)))
        row, inside = coords[0][0], utils.predicate_k(coords, x.shape[1])

        held, held_w = cute.make_rmem_tensor_like(gx), cute.make_rmem_tensor_like(gw)
        held.fill(0.0)
        held_w.fill(0.0)
        cute.copy(atom_w, gw, held_w, pred=inside)  # predicated by columns only: the vector has no rows
        if row < x.shape[0]:
            cute.copy(atom, gx, held, pred=inside)

        total = utils.row_reduce(held.load().to(Float32) * held_w.load().to(Float32), cute.ReductionOp.ADD,
                                 tv.shape[0][0], buffer[None, None, 0], barriers, init_val=0.0,
                                 hook_fn=tk.cluster_wait if const_expr(self.cluster_n > 1) else None)
        if coords[0][1] == 0 and row < x.shape[0]:  # the thread with the row's first column stores
            totals[row] = total.to(totals.element_type)


class Rsqrt(ReductionBase):
    """out = rsqrt(x), one element to a row: one block to a row, one thread at work."""

    def __init__(self, dtype, N):
        super().__init__(dtype, N, stage=1)

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, out).launch(grid=[x.shape[0], 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        if thread == 0:
            out[row, 0] = utils.rsqrt(x[row, 0])
