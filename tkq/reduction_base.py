"""ReductionBase: what every reduction over the rows of an (M, N) tensor has in common.

A subclass writes `__call__` (host side: layouts, launch) and `kernel` itself, in one pass, and takes from here the
thread-value layout, the reduction buffer and the cluster's start. The names are those of the public CuTe-DSL reduction
tutorial: a kernel written against that contract runs with its imports changed. `launch` compiles, caches and calls a
subclass on torch tensors.
"""
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from . import tile as tk
from .reduction import geometry


class ReductionBase:
    """dtype: element type of the row. N: columns. stage: reductions in one kernel, each with its buffer and mbarrier.
    reduction_dtype: what is exchanged between warps: Float32, or Int64 for two floats at once.

    Attributes: dtype, N, stage, reduction_dtype and, once `_set_cluster_n` has run, cluster_n. copy_bits, of the class:
    its kernel's widest access, on which `launch` insists.
    """

    copy_bits = 128

    def __init__(self, dtype, N: int, stage: int, reduction_dtype=Float32):
        self.dtype = dtype
        self.N = N
        self.stage = stage
        self.reduction_dtype = reduction_dtype

    # ---- choices a subclass may change ---------------------------------------------------------

    def _calculate_threads_per_row(self) -> int:
        """Threads of a block that share a row, a power of two: 8 to 256, by N, where it is not overridden."""
        return geometry.threads_per_row(self.N)

    def _get_num_threads(self) -> int:
        """Threads of a block, whole warps of whole rows: 128 or 256, by N, where it is not overridden."""
        return geometry.num_threads(self.N)

    def _set_cluster_n(self) -> None:
        """One block to a row. Override it where a cluster may share a row: self.cluster_n = geometry.cluster(N,
        width)."""
        self.cluster_n = 1

    # ---- geometry -------------------------------------------------------------------------------

    def _get_tile(self, num_copy_bits: int = 128) -> geometry.Tile:
        """The block's tile. cluster_n is cut down to what the row can feed, so read it afterwards."""
        vec = geometry.vector(self.N, self.dtype.width, num_copy_bits)
        threads = self._get_num_threads()
        t = geometry.tile(self.N, vec, self._calculate_threads_per_row(), threads, self.cluster_n)
        self.cluster_n = t.cluster
        return t

    def _get_tv_layout(self, num_copy_bits: int = 128):
        """(tiler_mn, tv_layout): the block's (rows, columns); ((threads to a row, rows), (vector, vectors)) -> tile.

        The vector is gcd(N, num_copy_bits // width), so any N works; a tile may reach past the row's end.
        """
        t = self._get_tile(num_copy_bits)
        tv_layout = cute.make_layout(
            ((t.threads_per_row, t.rows), (t.vector, t.blocks)),
            stride=((t.vector * t.rows, 1), (t.rows, t.rows * t.vector * t.threads_per_row)))
        return (t.rows, t.cols), tv_layout

    def _smem_size_in_bytes(self, tiler_mn, num_warps: int) -> int:
        """Shared memory of one tile of x, the reduction buffers and mbarriers (two to a stage), padding included."""
        tile = -(-tiler_mn[0] * tiler_mn[1] * self.dtype.width // 128) * 16
        buffer = self.stage * num_warps * self.cluster_n * self.reduction_dtype.width // 8
        return tile + -(-buffer // 16) * 16 + self.stage * 2 * (Int64.width // 8)

    def _get_reduction_buffer_layout(self, tv_layout: cute.Layout, cluster_n: int) -> cute.Layout:
        """(rows, (warps to a row, cluster_n), stage), a row's slots side by side."""
        num_warps = cute.size(tv_layout, mode=[0]) // cute.arch.WARP_SIZE
        warps_per_row = max(tv_layout.shape[0][0] // cute.arch.WARP_SIZE, 1)
        shape = (num_warps // warps_per_row, (warps_per_row, cluster_n), self.stage)
        return cute.make_ordered_layout(shape, order=(1, 0, 2))

    # ---- device ---------------------------------------------------------------------------------

    def _allocate_reduction_buffer_and_mbar(self, smem, tv_layout: cute.Layout, is_persistent: bool = False):
        """(reduction buffer, mbarriers or None). One mbarrier to a stage where a row spans a cluster; a persistent
        kernel gets as many again, for "all have read"."""
        layout = self._get_reduction_buffer_layout(tv_layout, self.cluster_n)
        buffer = smem.allocate_tensor(self.reduction_dtype, layout, byte_alignment=8)
        if self.cluster_n == 1:
            return buffer, None
        return buffer, smem.allocate_array(Int64, self.stage * (2 if is_persistent else 1))

    @cute.jit
    def _initialize_cluster(self, tidx: Int32, mbar_ptr: Optional[cute.Pointer], num_warps: cutlass.Constexpr[int],
                            is_persistent: cutlass.Constexpr[bool] = False):
        """Initialise the mbarriers and arrive at the cluster's barrier; nothing without a cluster.

        The caller waits for the cluster (`cute.arch.cluster_wait`, best as `row_reduce`'s hook_fn) before it exchanges.
        """
        if const_expr(self.cluster_n > 1):
            tk.nap("start")
            if tidx < self.stage:
                cute.arch.mbarrier_init(mbar_ptr + tidx, 1)
                if const_expr(is_persistent):
                    cute.arch.mbarrier_init(mbar_ptr + self.stage + tidx, num_warps * self.cluster_n)
            cute.arch.mbarrier_init_fence()
            tk.cluster_arrive_relaxed()

    # ---- from torch -------------------------------------------------------------------------------

    @classmethod
    def recipe(cls, *args, **options):
        """What has to be compiled to call this class on `args`; see `tkq.reduction.launch.recipe`."""
        from .reduction.launch import recipe

        return recipe(cls, args, options)

    @classmethod
    def launch(cls, *args, **options):
        """Compile (once, cached on disk) and call on torch tensors; see `tkq.reduction.launch.launch`."""
        from .reduction.launch import launch

        return launch(cls, args, options)
