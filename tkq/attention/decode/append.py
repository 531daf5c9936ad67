"""New keys and values into a paged cache, rotated on the way."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.runtime.compile import fake
from tkq.tile import vectors

VECTOR = 8


class Operands(NamedTuple):
    """Beside k (T, Hk, D): v (T, Hk, Dv), the caches (pages, page, Hk, D or Dv), slots (T,); q (T, H, D) and its result
    q_out; cos, sin (P, R / 2), positions (T,)."""

    v: cute.Tensor
    k_cache: cute.Tensor
    v_cache: cute.Tensor
    slots: cute.Tensor
    q: Optional[cute.Tensor]
    q_out: Optional[cute.Tensor]
    cos: Optional[cute.Tensor]
    sin: Optional[cute.Tensor]
    positions: Optional[cute.Tensor]


class KvAppend:
    """A thread has 8 columns of a head of a token: of k, of v, or of q. Rotated columns also read their partners, from
    L1 mostly. A token whose slot the cache does not have is skipped; a position that the table does not have is NaN."""

    THREADS = 256

    def __init__(self, spec):
        self.spec, self.dtype = spec, tk.element_type(spec.dtype)

    def fake_arguments(self):
        """Any sizes and strides of whole vectors."""
        spec, unit = self.spec, fake.sym(divisibility=VECTOR)
        T, Hk, pages, page, D, Dv = *(fake.sym() for _ in range(4)), unit, fake.sym(divisibility=VECTOR)

        def of(*shape):
            strides = (*(fake.sym64(divisibility=VECTOR) for _ in shape[1:]), 1)
            return fake.tensor(spec.dtype, shape, strides, align=16)

        def ints(kind, n):
            return fake.tensor(kind, (n,), align=8 if kind == "int64" else 4)

        q = q_out = cos = sin = positions = None
        if spec.table:
            table = fake.sym(), fake.sym(divisibility=VECTOR // 2 if spec.interleaved else VECTOR)
            cos, sin = (fake.tensor(spec.table, table, align=16) for _ in range(2))
            positions = ints(spec.positions, T)
        if spec.queries:
            H = fake.sym()
            q, q_out = of(T, H, D), of(T, H, D)
        return of(T, Hk, D), Operands(of(T, Hk, Dv), of(pages, page, Hk, D), of(pages, page, Hk, Dv),
                                      ints(spec.slots, T), q, q_out, cos, sin, positions)

    @cute.jit
    def __call__(self, k: cute.Tensor, operands: Operands, stream: cuda.CUstream):
        units = k.shape[0] * self.units(k, operands)
        self.kernel(k, operands).launch(grid=[cute.ceil_div(units, self.THREADS), 1, 1], block=[self.THREADS, 1, 1],
                                        stream=stream)

    def units(self, k, x):
        """Vectors of a token."""
        count = k.shape[1] * (k.shape[2] // VECTOR) + x.v.shape[1] * (x.v.shape[2] // VECTOR)
        return count if x.q is None else count + x.q.shape[1] * (x.q.shape[2] // VECTOR)

    @cute.kernel
    def kernel(self, k: cute.Tensor, x: Operands):
        self.thread(cute.arch.block_idx()[0] * self.THREADS + cute.arch.thread_idx()[0], k, x)

    @cute.jit
    def thread(self, unit: Int32, k: cute.Tensor, x: Operands):
        """What one thread does: the tests run it on a CPU, one after the other."""
        units = self.units(k, x)
        if unit < k.shape[0] * units:
            t, rest = unit // units, unit % units
            of_k, of_v = k.shape[1] * (k.shape[2] // VECTOR), x.v.shape[1] * (x.v.shape[2] // VECTOR)
            if rest < of_k + of_v:
                slot = Int64(x.slots[t])
                rows = Int64(x.k_cache.shape[0]) * Int64(x.k_cache.shape[1])
                if slot >= Int64(0) and slot < rows:
                    page, row = Int32(slot) // x.k_cache.shape[1], Int32(slot) % x.k_cache.shape[1]
                    if rest < of_k:
                        self.one(k, x.k_cache, (t, rest), (page, row), x, True)
                    else:
                        self.one(x.v, x.v_cache, (t, rest - of_k), (page, row), x, False)
            elif const_expr(x.q is not None):
                self.one(x.q, x.q_out, (t, rest - of_k - of_v), (t,), x, True)

    def one(self, src, dst, of, to, x, turned):
        """A vector of src, (token, which of the token's), to dst."""
        t, which = of
        chunks = src.shape[2] // VECTOR
        head, column = which // chunks, which % chunks * VECTOR
        held = vectors.load(vectors.run_at(src, (t, head, column), VECTOR))
        if turned and self.spec.table:
            held = self.turned(src, (t, head, column), held, x)
        vectors.store(held, vectors.run_at(dst, (*to, head, column), VECTOR))

    @cute.jit
    def turned(self, src, place, held, x):
        """The vector, rotated where the rotation reaches so far."""
        t, head, column = place
        half = x.cos.shape[1]
        result = cute.make_rmem_tensor((VECTOR,), self.dtype)
        result.store(held.load())
        if column < 2 * half:
            position = Int64(x.positions[t])
            there = (position >= Int64(0)) & (position < Int64(x.cos.shape[0]))
            row = Int32(cutlass.select_(there, position, Int64(0)))
            own = vectors.wide(held)
            if const_expr(self.spec.interleaved):
                cos, sin = (self.angles(m, row, column // 2, VECTOR // 2, there) for m in (x.cos, x.sin))
                found = neighbours(own, cos, sin)
            else:
                first = column < half
                partner = cutlass.select_(first, column + half, column - half)
                others = vectors.wide(vectors.load(vectors.run_at(src, (t, head, partner), VECTOR)))
                at = cutlass.select_(first, column, column - half)
                cos, sin = (self.angles(m, row, at, VECTOR, there) for m in (x.cos, x.sin))
                found = halves((own, others), cos, sin, first)
            result.store(vectors.packed(found, self.dtype).load())
        return result

    def angles(self, table, row, column, n, there):
        """n neighbours of the table's row, as fp32; NaN where there is none."""
        values = vectors.wide(vectors.load(vectors.run_at(table, (row, column), n)))
        return [cutlass.select_(there, value, Float32.nan) for value in values]


def neighbours(x, cos, sin):
    """Pairs (x[2 i], x[2 i + 1]), rotated."""
    pairs = [(x[2 * i], x[2 * i + 1], c, s) for i, (c, s) in enumerate(zip(cos, sin, strict=True))]
    return [e for a, b, c, s in pairs for e in (a * c - b * s, a * s + b * c)]


def halves(x, cos, sin, first):
    """x's first columns, rotated with its others. first: are they the first half's?"""
    return [a * c + cutlass.select_(first, -b, b) * s for a, b, c, s in zip(*x, cos, sin, strict=True)]
