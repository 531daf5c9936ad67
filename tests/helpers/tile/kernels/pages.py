"""A tile in groups of 8 rows, gathered from pages by one copy for each, as both forms of wgmma's operand b."""
from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk

from .common import put, sym, tensor


class Pages:
    """d = a @ b.T, e = c @ b. Box i of b (rows, cols) begins with group ``firsts[i, 1]`` of 8 rows of page ``firsts[i,
    0]`` of x (pages, page, heads, cols), head 1."""

    def __init__(self, rows, cols, box):
        self.b, self.a, self.c = tk.st(rows, cols, row_groups=True), tk.st(64, cols), tk.st(64, rows)
        self.box = replace(self.b, rows=box)

    @cute.jit
    def __call__(self, x: cute.Tensor, firsts: cute.Tensor, a: cute.Tensor, c: cute.Tensor, d: cute.Tensor,
                 e: cute.Tensor, stream: cuda.CUstream):
        x = cute.make_tensor(x.iterator, cute.select(x.layout, [1, 3, 2, 0]))
        loads = tk.gl.load(tk.row_groups(x, 64), self.box), tk.gl.load(a, self.a), tk.gl.load(c, self.c)
        self.kernel(loads, firsts, tk.groups_apart(x), d, e).launch(
            grid=[1, 1, 1], block=[128, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, loads: tuple, firsts: cute.Tensor, apart: Int32, d: cute.Tensor, e: cute.Tensor):
        (x, ga, gc), al = loads, tk.SharedAllocator()
        a, c, ring, full = al.tile(self.a)[0], al.tile(self.c)[0], al.tile(self.b, 2), al.semaphores(1)
        tk.init_block(lambda: tk.init(full, 1))
        boxes, n = ring.scratch(self.box), self.b.rows // self.box.rows
        if tk.warp_id() == 0:
            tk.expect_bytes(full, self.a.bytes + self.b.bytes + self.c.bytes)
            tk.load_async(a, ga, (0, 0), full)
            tk.load_async(c, gc, (0, 0), full)
            for i in cutlass.range_constexpr(n):
                tk.load_async(boxes[n + i], x.rows_from(firsts[i, 0] * apart + firsts[i, 1]), (1, 0, 0), full)
        tk.wait(full, 0)
        by_rows, by_cols = tk.rt_fl(self.b.rows), tk.rt_fl(self.b.cols)
        tk.mm_ABt(by_rows, a, ring[1])
        tk.mm_AB(by_cols, c, ring[1])
        tk.mma_wait(0)
        put(d, by_rows)
        put(e, by_cols)


def build(rows, cols, box):
    strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
    x = cute.runtime.make_fake_tensor(tk.element_type("bf16"), (sym(), sym(), sym(), cols), strides, assumed_align=16)
    a, c, d, e = (tensor(dtype, 64, n) for dtype, n in (("bf16", cols), ("bf16", rows), ("fp32", rows), ("fp32", cols)))
    return Pages(rows, cols, box), (x, tensor("int32", rows // box, 2), a, c, d, e)
