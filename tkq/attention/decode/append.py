"""New keys and values into a paged cache, rotated and quantised on the way."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.float8 import nan_max, scale_of

VECTOR, WARP = 8, 32


class Operands(NamedTuple):
    """Beside k (T, Hk, D): v (T, Hk, Dv), the caches (pages, page, Hk, D or Dv), slots (T,); q (T, H, D) and its result
    q_out; cos, sin (P, R / 2), positions (T,); k_scale, v_scale of float8 caches: (Hk,), or (pages, page, Hk), which
    are results."""

    v: cute.Tensor
    k_cache: cute.Tensor
    v_cache: cute.Tensor
    slots: cute.Tensor
    q: Optional[cute.Tensor]
    q_out: Optional[cute.Tensor]
    cos: Optional[cute.Tensor]
    sin: Optional[cute.Tensor]
    positions: Optional[cute.Tensor]
    k_scale: Optional[cute.Tensor]
    v_scale: Optional[cute.Tensor]


class KvAppend:
    """A thread has 8 columns of a head of a token: of k, of v, or of q. Rotated columns also read their partners, from
    L1 mostly. A token whose slot the cache does not have is skipped; a position that the table does not have is NaN.

    Where scales of a float8 cache are found here, a warp has a head of a token, 8 columns a lane, up to 256."""

    THREADS = 256

    def __init__(self, spec):
        self.spec, self.dtype = spec, tk.element_type(spec.dtype)
        self.by_token = spec.scales == "token"

    def fake_arguments(self):
        """Any sizes and strides of whole vectors."""
        spec, unit = self.spec, fake.sym(divisibility=VECTOR)
        T, Hk, pages, page, D, Dv = *(fake.sym() for _ in range(4)), unit, fake.sym(divisibility=VECTOR)

        def of(*shape, dtype=spec.dtype):
            strides = (*(fake.sym64(divisibility=16 if dtype == "e4m3" else VECTOR) for _ in shape[1:]), 1)
            return fake.tensor(dtype, shape, strides, align=16)

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
        cache, scale = spec.cache or spec.dtype, {None: None, "head": (Hk,), "token": (pages, page, Hk)}[spec.scales]
        scales = [scale and fake.tensor("fp32", scale, tuple(fake.sym64() for _ in scale), align=4) for _ in range(2)]
        return of(T, Hk, D), Operands(of(T, Hk, Dv), of(pages, page, Hk, D, dtype=cache),
                                      of(pages, page, Hk, Dv, dtype=cache), ints(spec.slots, T), q, q_out, cos, sin,
                                      positions, *scales)

    @cute.jit
    def __call__(self, k: cute.Tensor, operands: Operands, stream: cuda.CUstream):
        units = k.shape[0] * self.units(k, operands)
        self.kernel(k, operands).launch(grid=[cute.ceil_div(units, self.THREADS), 1, 1], block=[self.THREADS, 1, 1],
                                        stream=stream)

    def units(self, k, x):
        """Vectors of a token; threads, where a warp has a head."""
        if self.by_token:
            return WARP * (2 * k.shape[1] + (0 if x.q is None else x.q.shape[1]))
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
            if const_expr(self.by_token):
                of_k = of_v = k.shape[1] * WARP
            else:
                of_k, of_v = k.shape[1] * (k.shape[2] // VECTOR), x.v.shape[1] * (x.v.shape[2] // VECTOR)
            if rest < of_k + of_v:
                slot = Int64(x.slots[t])
                rows = Int64(x.k_cache.shape[0]) * Int64(x.k_cache.shape[1])
                if slot >= Int64(0) and slot < rows:
                    page, row = Int32(slot) // x.k_cache.shape[1], Int32(slot) % x.k_cache.shape[1]
                    if rest < of_k:
                        self.one(k, (x.k_cache, x.k_scale), (t, rest), (page, row), x, True)
                    else:
                        self.one(x.v, (x.v_cache, x.v_scale), (t, rest - of_k), (page, row), x, False)
            elif const_expr(x.q is not None):
                self.one(x.q, (x.q_out, None), (t, rest - of_k - of_v), (t,), x, True)

    def one(self, src, to, of, place, x, turned):
        """A vector of src, (token, which of the token's), to (a tensor, its scales or None)."""
        t, which = of
        chunks = WARP if self.by_token else src.shape[2] // VECTOR
        self.vector(src, to, (t, which // chunks, which % chunks * VECTOR), place, x, turned)

    @cute.jit
    def vector(self, src, to, at, place, x, turned: Constexpr[bool]):
        _, head, column = at
        dst, scales = to
        values = cute.make_rmem_tensor((VECTOR,), Float32)
        values.fill(0.0)
        inside = column < src.shape[2]
        if inside:
            self.read(src, at, values, x, turned)
        factor = Float32(1.0)
        if const_expr(self.spec.scales == "head" and scales is not None):
            factor = cute.arch.rcp_approx(scales[head])
        elif const_expr(self.by_token and scales is not None):
            scale = scale_of(self.largest(values), "e4m3")
            if column == 0:
                scales[(*place, head)] = scale
            factor = cute.arch.rcp_approx(scale)
        if inside:
            found = [values[i] if const_expr(scales is None) else values[i] * factor for i in range(VECTOR)]
            vectors.store(vectors.packed(found, dst.element_type), vectors.run_at(dst, (*place, head, column), VECTOR))

    def read(self, src, at, values, x, turned):
        held = vectors.load(vectors.run_at(src, at, VECTOR))
        values.store(held.load().to(Float32))
        if turned and self.spec.table:
            self.turned(src, at, values, x)

    def largest(self, values):
        """Of the warp's, without their signs; NaN where one is."""
        top = Float32(0.0)
        for i in range(VECTOR):
            top = nan_max(top, cute.math.absf(values[i]))
        for step in range(5):
            top = nan_max(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
        return top

    @cute.jit
    def turned(self, src, place, values, x):
        """The vector is rotated, where the rotation reaches so far."""
        t, head, column = place
        half = x.cos.shape[1]
        if column < 2 * half:
            position = Int64(x.positions[t])
            there = (position >= Int64(0)) & (position < Int64(x.cos.shape[0]))
            row = Int32(cutlass.select_(there, position, Int64(0)))
            own = [values[i] for i in range(VECTOR)]
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
            for i in cutlass.range_constexpr(VECTOR):
                values[i] = found[i]

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
