"""A new reduction: softmax(x / temperature) over the rows of a matrix, as a subclass of ReductionBase.

    python examples/write_a_reduction.py

With a Hopper GPU it is checked against PyTorch and timed with torch.compile; without one it is only compiled.
"""
import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, const_expr

from tkq import tile as tk
from tkq import utils
from tkq.reduction.geometry import cluster
from tkq.reduction_base import ReductionBase
from tkq.testing import sass, timing


class Softmax(ReductionBase):
    def __init__(self, dtype, N):
        super().__init__(dtype, N, stage=2)  # two reductions: the maximum, the sum

    def _set_cluster_n(self):
        self.cluster_n = cluster(self.N, self.dtype.width)

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        self._set_cluster_n()
        tiler, tv = self._get_tv_layout()
        self.kernel(x, out, scale, tv, tiler).launch(
            grid=[cute.ceil_div(x.shape[0], tiler[0]), self.cluster_n, 1], block=[cute.size(tv, mode=[0]), 1, 1],
            cluster=[1, self.cluster_n, 1] if const_expr(self.cluster_n > 1) else None, stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, scale: Float32, tv: cute.Layout, tiler: cute.Shape):
        thread, _, _ = cute.arch.thread_idx()
        block, part, _ = cute.arch.block_idx()
        part = part if const_expr(self.cluster_n > 1) else 0
        smem = tk.SharedAllocator()
        buffer, barriers = self._allocate_reduction_buffer_and_mbar(smem, tv)
        self._initialize_cluster(thread, barriers, cute.size(tv, mode=[0]) // 32)

        # this thread's vectors of the block's tile, and their coordinates
        vector, group = tv.shape[1][0], tv.shape[0][0]
        bits = vector * self.dtype.width
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=bits)
        mine = cute.make_tiled_copy(atom, tv, tiler).get_slice(thread)
        coords = mine.partition_S(cute.local_tile(cute.make_identity_tensor(x.shape), tiler, (block, part)))
        gx, go = [mine.partition_S(cute.local_tile(utils.domain_offset_i64((block * tiler[0], 0), t), tiler, (0, part)))
                  for t in (x, out)]
        row, inside = coords[0][0], utils.predicate_k(coords, x.shape[1])
        held, result = cute.make_rmem_tensor_like(gx), cute.make_rmem_tensor_like(go)
        held.fill(-self.dtype.inf)
        if row < x.shape[0]:
            cute.copy(atom, gx, held, pred=inside)

        e = held.load().to(Float32) * (scale * math.log2(math.e))
        top = self.reduce(e, cute.ReductionOp.MAX, group, buffer, barriers, 0, -Float32.inf)
        e = cute.math.exp2(e - top, fastmath=True)
        total = self.reduce(e, cute.ReductionOp.ADD, group, buffer, barriers, 1, 0.0)
        result.store((e * cute.arch.rcp_approx(total)).to(self.dtype))
        if row < x.shape[0]:
            cute.copy(atom, result, go, pred=inside)

    def reduce(self, e, op, group, buffer, barriers, stage: cutlass.Constexpr, init):
        clustered = self.cluster_n > 1  # CTAs of a cluster wait once, before the first exchange
        return utils.row_reduce(e, op, group, buffer[None, None, stage], barriers + stage if clustered else None,
                                init_val=init, hook_fn=tk.cluster_wait if clustered and stage == 0 else None)


def softmax(x, temperature=1.0):
    out = torch.empty_like(x)
    Softmax.launch(x, out, 1.0 / temperature)
    return out


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for N in (1000, 4096, 32768, 131072):
        x = torch.randn(8192 if device == "cuda" else 1, N, device=device, dtype=torch.bfloat16)
        if device == "cpu":
            print(sass.shown(f"softmax N {N}", Softmax.recipe(x, torch.empty_like(x), 1.0)))
            continue
        wanted = torch.softmax(x.float() / 0.7, -1)
        error = ((softmax(x, 0.7).float() - wanted).abs() / wanted).max().item()
        assert error < 2**-7, f"N {N}: relative error {error}"
        peer = torch.compile(lambda x: torch.softmax(x / 0.7, -1), dynamic=False)
        both = timing.compare({"tkq": lambda x: softmax(x, 0.7), "torch.compile": peer}, lambda i, x=x: (x.clone(),))
        print(f"N {N}: relative error {error:.1e},", ", ".join(f"{t.name} {t.median_ms:.3f} ms" for t in both.timings))
    if device == "cpu":
        print("No GPU: compiled for sm_90a only; nothing was run or timed.")


if __name__ == "__main__":
    main()
