"""Dot products of rows."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.finish.spec import VECTOR, RowDotsSpec
from tkq.runtime.compile import fake
from tkq.tile import vectors

THREADS = 256


class RowDots:
    """y[n] = the sum over c of a[n, c] * b[n, c], in fp32, rounded once.

    `lanes` threads have a row, 8 columns each at a time, and add up what they found by shuffles, in an order that the
    columns alone decide. No shared memory, no barrier."""

    def __init__(self, spec: RowDotsSpec):
        self.spec, self.dtype = spec, tk.element_type(spec.out)

    def fake_arguments(self):
        """Compiled for any n."""
        spec, n = self.spec, fake.sym()
        a, b = (fake.tensor(spec.dtype, (n, spec.columns)) for _ in range(2))
        return a, b, fake.tensor(spec.out, (n,), align=self.dtype.width // 8)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(a, b, y).launch(grid=[cute.ceil_div(y.shape[0], THREADS // self.spec.lanes), 1, 1],
                                    block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, b: cute.Tensor, y: cute.Tensor):
        self.thread(cute.arch.block_idx()[0], cute.arch.thread_idx()[0], a, b, y)

    @cute.jit
    def thread(self, block: Int32, thread: Int32, a: cute.Tensor, b: cute.Tensor, y: cute.Tensor):
        """What one thread does. Past the last row it takes part in the shuffles alone."""
        lanes = self.spec.lanes
        n, lane = block * (THREADS // lanes) + thread // lanes, thread % lanes
        total = cute.make_rmem_tensor((1,), Float32)
        total[0] = Float32(0.0)
        for i in cutlass.range_constexpr(-(-self.spec.columns // (VECTOR * lanes))):
            column = (i * lanes + lane) * VECTOR
            if n < y.shape[0] and column < self.spec.columns:
                x, w = [vectors.wide(vectors.load(vectors.run_at(m, (n, column), VECTOR))) for m in (a, b)]
                for e in cutlass.range_constexpr(VECTOR):
                    total[0] = cute.math.fma(x[e], w[e], total[0])
        for i in cutlass.range_constexpr(lanes.bit_length() - 1):
            total[0] = total[0] + cute.arch.shuffle_sync_bfly(total[0], offset=1 << i)
        if lane == 0 and n < y.shape[0]:
            y[n] = self.dtype(total[0])
