"""C = A @ B for operands that TMA cannot take: any stride, any alignment. Correct, not tuned."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .. import tile as tk
from .dense import operands, products, transposed
from .spec import GemmSpec

M, N, K = 64, 128, 64  # a block's tile


class ElementsGemm:
    """A warpgroup a tile of C, one block each: its threads load a step of K element by element (zeros past the end),
    meet, multiply, meet again. Several blocks on a processor run under each other's loads."""

    def __init__(self, spec: GemmSpec):
        self.spec = spec
        dtype = tk.element_type(spec.dtype)
        a_t, b_t = spec.transposed
        self.a_tile = tk.st(K, M, dtype) if a_t else tk.st(M, K, dtype)
        self.b_tile = tk.st(N, K, dtype) if b_t else tk.st(K, N, dtype)
        _, self.mma = products(spec)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, blocks: Int32, stream: cuda.CUstream):
        a_t, b_t = self.spec.transposed
        tiles = cute.ceil_div(c.shape[0], M) * cute.ceil_div(c.shape[1], N)
        self.kernel(transposed(a) if a_t else a, transposed(b) if b_t else b, c, cute.ceil_div(a.shape[1], K)).launch(
            grid=[tiles, 1, 1], block=[tk.WARPGROUP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, steps: Int32):
        a_t, b_t = self.spec.transposed
        al = tk.SharedAllocator()
        x, y = al.tile(self.a_tile)[0], al.tile(self.b_tile)[0]
        rows, me = cute.ceil_div(c.shape[0], M), tk.thread_in_warpgroup()
        row, col = cute.arch.block_idx()[0] % rows * M, cute.arch.block_idx()[0] // rows * N
        acc = tk.rt_fl(N)
        tk.zero(acc)
        for step in cutlass.range(steps, unroll=1):
            k = step * K
            tk.load_elements(x, a, k if a_t else row, row if a_t else k, tk.WARPGROUP, me)
            tk.load_elements(y, b, col if b_t else k, k if b_t else col, tk.WARPGROUP, me)
            tk.publish()
            tk.sync_block()
            self.mma(acc, x, y)
            tk.mma_wait()
            tk.sync_block()
        tk.store_elements(c, acc, row, col, self.spec.accumulate)


def build(spec: GemmSpec):
    """(kernel, fake arguments): as ``dense.build``, but ``blocks`` is not used: it is one a tile."""
    return ElementsGemm(spec), (*operands(spec), Int32(1))
