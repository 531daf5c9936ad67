"""Two partial results of attention, over keys apart from each other, become one."""
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.runtime.compile import fake
from tkq.tile import vectors

VECTOR = 8


class Operands(NamedTuple):
    """Beside o_a (B, S, H, D): o_b; lse_a, lse_b (B, H, S); o as o_a, lse as lse_a, the results."""

    o_b: cute.Tensor
    lse_a: cute.Tensor
    lse_b: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor


class MergeState:
    """A thread has 8 columns of a row. A part that saw no key, of lse -inf, counts for nothing, whatever its o is."""

    THREADS = 256

    def __init__(self, spec):
        self.spec, self.dtype = spec, tk.element_type(spec.dtype)

    def fake_arguments(self):
        """Any sizes and strides of whole vectors."""
        B, S, H, D = (*(fake.sym() for _ in range(3)), fake.sym(divisibility=VECTOR))
        strides = lambda unit: tuple(fake.sym64(divisibility=unit) for _ in range(3))
        o = lambda: fake.tensor(self.spec.dtype, (B, S, H, D), (*strides(VECTOR), 1), align=16)
        lse = lambda: fake.tensor("fp32", (B, H, S), strides(1), align=4)
        return o(), Operands(o(), lse(), lse(), o(), lse())

    @cute.jit
    def __call__(self, o_a: cute.Tensor, operands: Operands, stream: cuda.CUstream):
        B, S, H, D = o_a.shape
        self.kernel(o_a, operands).launch(grid=[cute.ceil_div(B * S * H * (D // VECTOR), self.THREADS), 1, 1],
                                          block=[self.THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, o_a: cute.Tensor, x: Operands):
        self.thread(cute.arch.block_idx()[0] * self.THREADS + cute.arch.thread_idx()[0], o_a, x)

    @cute.jit
    def thread(self, unit: Int32, o_a: cute.Tensor, x: Operands):
        """What one thread does: the tests run it on a CPU, one after the other."""
        B, S, H, D = o_a.shape
        chunks = D // VECTOR
        if unit < B * S * H * chunks:
            row, chunk = unit // chunks, unit % chunks
            b, s, h = row // (S * H), row // H % S, row % H
            lse_a, lse_b = x.lse_a[b, h, s], x.lse_b[b, h, s]
            top = cutlass.max(lse_a, lse_b)
            base = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
            of_a, of_b = (cute.math.exp2((lse - base) * tk.LOG2E) for lse in (lse_a, lse_b))
            total = of_a + of_b
            nothing = total == Float32(0.0)
            inverse = cutlass.select_(nothing, Float32(0.0), Float32(1.0) / total)
            place = b, s, h, chunk * VECTOR
            a, b_ = (vectors.wide(vectors.load(vectors.run_at(m, place, VECTOR))) for m in (o_a, x.o_b))
            a = [cutlass.select_(of_a == Float32(0.0), Float32(0.0), e * of_a) for e in a]
            b_ = [cutlass.select_(of_b == Float32(0.0), Float32(0.0), e * of_b) for e in b_]
            found = vectors.packed([(p + q) * inverse for p, q in zip(a, b_)], self.dtype)
            vectors.store(found, vectors.run_at(x.o, place, VECTOR))
            if chunk == 0:
                lse = base + cute.math.log2(total) * tk.LN2
                x.lse[b, h, s] = cutlass.select_(nothing, -Float32.inf, lse)
