"""One product: operands by TMA, wgmma, the accumulator to global memory as it is."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tests.helpers.tile.cases import Product

from .common import put, tensor


class Mma:
    def __init__(self, p: Product):
        self.p = p
        self.a = tk.st(*p.a_shape, tk.element_type(p.a_dtype), p.swizzle or None)
        self.b = tk.st(*p.b_shape, tk.element_type(p.b_dtype), p.swizzle or None)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream: cuda.CUstream):
        self.kernel(tk.gl.load(a, self.a), tk.gl.load(b, self.b), d).launch(
            grid=[1, 1, 1], block=[128, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, ga: tk.gl, gb: tk.gl, d: cute.Tensor):
        al = tk.SharedAllocator()
        a, b, full = al.tile(self.a)[0], al.tile(self.b, 2)[1], al.semaphores(1)
        tk.init_block(lambda: tk.init(full, 1))
        if tk.warp_id() == 0:
            tk.prefetch(ga, gb)
            tk.expect_bytes(full, self.a.bytes + self.b.bytes)
            tk.load_async(a, ga, (0, 0), full)
            tk.load_async(b, gb, (0, 0), full)
        tk.wait(full, 0)
        if cutlass.const_expr(self.p.registers):
            x = tk.rt(self.p.k, self.a.dtype)
            tk.load(x, a)
            a = x
        if cutlass.const_expr(self.p.loop):
            for i in cutlass.range(self.p.a_parts, unroll=1):
                for j in cutlass.range(self.p.b_parts, unroll=1):
                    self.product(a, b, d, i, j)
        else:
            for i in cutlass.range_constexpr(self.p.a_parts):
                for j in cutlass.range_constexpr(self.p.b_parts):
                    self.product(a, b, d, i, j)

    def product(self, a, b, d, i, j):
        width = self.p.n // self.p.b_parts
        acc = tk.rt_fl(width)
        parts = {} if self.p.a_parts == self.p.b_parts == 1 else dict(a_part=i, b_part=j)
        if cutlass.const_expr(self.p.span):
            parts["k"] = self.p.span
        getattr(tk, f"mm_{self.p.form}")(acc, a, b, **parts)
        if self.p.twice:
            getattr(tk, f"mma_{self.p.form}")(acc, a, b, **parts)
            tk.mma_fence()
            tk.mma_commit()  # of nothing: a group all the same
        tk.mma_wait(0)
        put(cute.local_tile(d, (64, width), (i, j)), acc)


def build(p: Product):
    return Mma(p), (tensor(p.a_dtype, *p.a_shape), tensor(p.b_dtype, *p.b_shape), tensor("fp32", 64 * p.a_parts, p.n))
