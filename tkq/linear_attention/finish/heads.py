"""Sums over heads that share one of q and k."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.finish.spec import VECTOR, HeadSumsSpec
from tkq.runtime.compile import fake
from tkq.tile import vectors

THREADS = 256


class HeadSums:
    """y[n, c] = the sum over heads h of a[n, h, c], in fp32, from the first head to the last, rounded once. n: a token
    and a head of y.

    A thread has 8 columns of one n, 16 bytes of y; of `at_once` heads all loads are in flight before the first is used.
    Everything is read and written once: no shared memory, no barrier."""

    def __init__(self, spec: HeadSumsSpec):
        self.spec, self.dtype = spec, tk.element_type(spec.dtype)
        self.vectors = spec.columns // VECTOR

    def fake_arguments(self):
        """Compiled for any n and heads."""
        spec, n, heads = self.spec, fake.sym(), fake.sym(divisibility=self.spec.at_once)
        return fake.tensor(spec.of, (n, heads, spec.columns)), fake.tensor(spec.dtype, (n, spec.columns))

    @cute.jit
    def __call__(self, a: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        rows = THREADS // self.vectors
        self.kernel(a, y).launch(grid=[cute.ceil_div(y.shape[0], rows), 1, 1], block=[rows * self.vectors, 1, 1],
                                 stream=stream)

    @cute.kernel
    def kernel(self, a: cute.Tensor, y: cute.Tensor):
        self.thread(cute.arch.block_idx()[0], cute.arch.thread_idx()[0], a, y)

    @cute.jit
    def thread(self, block: Int32, thread: Int32, a: cute.Tensor, y: cute.Tensor):
        """What one thread does: the tests run it on a CPU, one after the other."""
        n = block * (THREADS // self.vectors) + thread // self.vectors
        column = thread % self.vectors * VECTOR
        if n < y.shape[0]:
            total = cute.make_rmem_tensor((VECTOR,), Float32)
            total.fill(0.0)
            for part in cutlass.range(a.shape[1] // self.spec.at_once, unroll=1):
                self.add(total, a, n, part * self.spec.at_once, column)
            vectors.store(vectors.packed([total[e] for e in range(VECTOR)], self.dtype),
                          vectors.run_at(y, (n, column), VECTOR))

    def add(self, total, a, n, first, column):
        """Heads from `first` on."""
        held = [vectors.load(vectors.run_at(a, (n, first + i, column), VECTOR)) for i in range(self.spec.at_once)]
        for of_head in held:
            for e, x in enumerate(vectors.wide(of_head)):
                total[e] = total[e] + x
