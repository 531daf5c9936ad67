"""The kernels behind linear attention's launches on a CPU: their own `thread`, called for one thread after the other.

What differs from the GPU: loads and stores go element by element, and a row of a dot product has one thread, so that
nothing is exchanged."""
import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tests.helpers.emulation import host
from tkq.linear_attention.channels import sums
from tkq.linear_attention.decays import kernel as decays
from tkq.linear_attention.engine.packed import Piece
from tkq.linear_attention.finish import heads, rows
from tkq.runtime.compile import fake
from tkq.tile import vectors


class HeadSumsOnCpu(heads.HeadSums):
    @cute.jit
    def __call__(self, a, y):
        rows_each = heads.THREADS // self.vectors
        for block in cutlass.range(cute.ceil_div(y.shape[0], rows_each)):
            for thread in cutlass.range(rows_each * self.vectors):
                self.thread(Int32(block), Int32(thread), a, y)


class RowDotsOnCpu(rows.RowDots):
    @cute.jit
    def __call__(self, a, b, y):
        for block in cutlass.range(cute.ceil_div(y.shape[0], rows.THREADS)):
            for thread in cutlass.range(rows.THREADS):
                self.thread(Int32(block), Int32(thread), a, b, y)


class ColumnSumsOnCpu(sums.ColumnSums):
    @cute.jit
    def __call__(self, first, others, segments: Int32):
        x = sums.Given(first, *others)
        for batch in cutlass.range(x.y.shape[0]):
            of = Piece(Int32(0), x.tokens, x.tokens, Int32(batch))
            for segment in cutlass.range(segments - int(self.finds)):
                for col in cutlass.range(x.y.shape[2]):
                    self.thread((Int32(batch), Int32(segment), Int32(col)), of, x, segments)


class ColumnDecaysOnCpu(decays.ColumnDecays):
    @cute.jit
    def __call__(self, g, others, bound: Float32):
        of = decays.Operands(g, *others)
        for block in cutlass.range(cute.ceil_div(g.shape[0], self.tokens)):
            for thread in cutlass.range(cute.ceil_div(g.shape[1], decays.VECTOR) + 1):
                self.thread(Int32(block), Int32(thread), of, bound)


def _load(src, once=False):
    held = cute.make_rmem_tensor(cute.size(src), src.element_type)
    for i in range(cute.size(src)):
        held[i] = src[i]
    return held


def _store(held, dst, once=False):
    for i in range(cute.size(held)):
        dst[i] = held[i]


def function(kernel, monkeypatch):
    """The compiled kernel, of one of this file's classes; takes tensors of the CPU."""
    with monkeypatch.context() as patched:
        patched.setattr(fake, "tensor", functools.partial(fake.tensor, host=True))
        patched.setattr(vectors, "load", _load)
        patched.setattr(vectors, "store", _store)
        patched.setattr(cute.math, "fma", lambda a, b, c: a * b + c)
        exp2 = cute.math.exp2
        patched.setattr(cute.math, "exp2", lambda x, fastmath=False: exp2(x))
        patched.setattr(cute.math, "absf", lambda x: cutlass.select_(x < 0.0, -x, x))
        patched.setattr(cute.arch, "rcp_approx", lambda x: 1.0 / x)
        return host.compiled(kernel, kernel.fake_arguments())
