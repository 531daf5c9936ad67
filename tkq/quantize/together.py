"""As `Twice`, of few tiles: one launch, as three take the CPU longer than so little takes the GPU."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from .. import tile as tk
from .spec import CLUSTER, EDGE, TileSpec
from .tiles import THREADS, Operands, operands
from .twice import Twice


class Together(Twice):
    """One cluster of 8 blocks, which take the tiles in turn, with all of it between two barriers of the cluster:

      time ->
      block 0   |zeros to amax|barrier|x to amax, tile 0, 8 ..|barrier|x and amax to q ..: tile 0, 8 ..|
      block 1   |zeros        |barrier|x to amax, tile 1, 9 ..|barrier|                    tile 1, 9 ..|

    What `Twice` does in three launches.
    """

    @cute.jit
    def __call__(self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, qt: Optional[cute.Tensor],
                 scale_t: Optional[cute.Tensor], amax: cute.Tensor, stream: cuda.CUstream):
        across = cute.ceil_div(x.shape[1], EDGE)
        self.kernel(Operands(x, q, scale, qt, scale_t, amax), across, across * cute.ceil_div(x.shape[0], EDGE)).launch(
            grid=[CLUSTER, 1, 1], block=[THREADS, 1, 1], cluster=[CLUSTER, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, g: Operands, across: Int32, tiles: Int32):
        al, t, block = tk.SharedAllocator(), cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        for i in cutlass.range(block * THREADS + t, g.amax.shape[0], CLUSTER * THREADS, unroll=1):
            g.amax[i] = Int32(0)
        tk.cluster_sync()
        self.each(self.find.take, g, al, t, block, across, tiles)
        tk.cluster_sync()
        self.each(self.write.take, g, al, t, block, across, tiles)

    @cute.jit
    def each(self, step: Constexpr, g: Constexpr, al: Constexpr, t, block, across, tiles):
        for number in cutlass.range(block, tiles, CLUSTER, unroll=1):
            step(g, al, t, (number // across, number % across))
            cute.arch.sync_threads()  # what is in shared memory is the next tile's then


def build(spec: TileSpec):
    """(kernel, fake arguments)."""
    return Together(spec), operands(spec)
