"""Results rounded as they are made, with column vectors from shared memory; and blocks of several roles."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk

from .common import get, one_block, put, tensor

NARROW = {
    "product": lambda d, a, b, v, w, n: tk.apply_narrow(d, lambda x, y: x * y, a, b),
    "vectors": lambda d, a, b, v, w, n: tk.apply_narrow(d, lambda x, y, r, c: (x + y + r) * c, a, b, v, w),
    "number": lambda d, a, b, v, w, n: tk.apply_narrow(d, lambda x, y: x * y, b, 3.0),
    "column": lambda d, a, b, v, w, n: tk.apply_narrow(
        d, lambda x, c, limit: cutlass.select_(c < limit, x, Float32(0.0)), a, tk.COLUMN, n - tk.first_col()),
}
TRIANGLES = [dict(apart=apart, upper=upper) for apart in (0, 1) for upper in (False, True)]


def build_triangle(dtype):
    """a fp32 (64, 64), v and w (64): out (4, 64, 64) of dtype, a half of (a + v) * w for each of TRIANGLES."""
    @cute.jit
    def body(a, v, w, out):
        ta, td, row, col = tk.rt_fl(64), tk.rt(64, tk.element_type(dtype)), tk.rv(), tk.cv(64)
        get(ta, a)
        tk.load_rows(row, v, 0, cute.size(v))
        tk.load_cols(col, w, 0, cute.size(w))
        for k in cutlass.range_constexpr(len(TRIANGLES)):
            tk.apply_triangle(td, lambda x, r, c: (x + r) * c, ta, row, col, **TRIANGLES[k])
            put(out[k, None, None], td)

    return one_block(body, (tensor("fp32", 64, 64), tensor("fp32", 64), tensor("fp32", 64), tensor(dtype, 4, 64, 64)))


def build_narrow(dtype, cols):
    """a fp32, b of dtype, both (64, cols), v (64), w (cols), n an int: one (64, cols) of dtype for each of NARROW."""
    @cute.jit
    def body(a, b, v, w, n, out):
        al = tk.SharedAllocator()
        shared = al.vector(cols, 2)[None, 1]
        t = cute.arch.thread_idx()[0]
        for i in cutlass.range_constexpr(-(-cols // 128)):
            if t + 128 * i < cols:
                shared[t + 128 * i] = w[t + 128 * i]
        tk.sync_block()
        ta, tb, td = tk.rt_fl(cols), tk.rt(cols, tk.element_type(dtype)), tk.rt(cols, tk.element_type(dtype))
        get(ta, a)
        get(tb, b)
        row, col = tk.rv(), tk.cv(cols)
        tk.load_rows(row, v, 0, cute.size(v))
        tk.load_shared_cols(col, shared)
        for k, op in enumerate(NARROW.values()):
            op(td, ta, tb, row, col, n[0])
            put(out[k, None, None], td)

    return one_block(body, (
        tensor("fp32", 64, cols), tensor(dtype, 64, cols), tensor("fp32", 64), tensor("fp32", cols),
        tensor("int32", 1), tensor(dtype, len(NARROW), 64, cols)))


def build_e4m3(cols):
    """a fp32 (64, cols): out (64, cols) e4m3, as an A operand has it."""
    @cute.jit
    def body(a, out):
        ta, td = tk.rt_fl(cols), tk.rt(cols, tk.element_type("e4m3"))
        get(ta, a)
        tk.copy_e4m3(td, ta)
        put_operand(out, td)

    return one_block(body, (tensor("fp32", 64, cols), tensor("e4m3", 64, cols)))


def put_operand(out, tile):
    """out (64, cols) = an A operand of e4m3."""
    for i in range(tile.cols // 2):
        byte, row, half, step = i % 4, i // 4 % 2, i // 8 % 2, i // 16
        col = 32 * step + 16 * half + 4 * (tk.lane_id() % 4) + byte
        out[tk.first_row() + 8 * row, col] = tile.tensor[i]


def build_exp2_e4m3(cols, factor, every):
    """a fp32 (64, cols), shift (64): out (64, cols) e4m3 = 2 ** (factor * a - shift) of one of ``every`` groups, as an
    A operand has it, 1 elsewhere."""
    @cute.jit
    def body(a, shift, out):
        ta, one, td, row = tk.rt_fl(cols), tk.rt_fl(cols), tk.rt(cols, tk.element_type("e4m3")), tk.rv()
        get(ta, a)
        tk.load_rows(row, shift, 0, 64)
        tk.fill(one, 1.0)
        tk.copy_e4m3(td, one)
        tk.exp2_e4m3(td, ta, factor, row, range(0, cols // 8, every))
        put_operand(out, td)

    return one_block(body, (tensor("fp32", 64, cols), tensor("fp32", 64), tensor("e4m3", 64, cols)))


def build_exp2(cols, every):
    """a fp32 (64, cols): out = 2 ** a, so many of them by a polynomial."""
    @cute.jit
    def body(a, out):
        tile = tk.rt_fl(cols)
        get(tile, a)
        tk.exp2_polynomial(tile, tile, every)
        put(out, tile)

    return one_block(body, (tensor("fp32", 64, cols), tensor("fp32", 64, cols)))


class Roles:
    """out[thread] = 1000 * role + 100 * the warpgroup's number in the role + the warp's in the warpgroup."""

    def __init__(self, roles):
        self.roles = roles
        self.threads = 128 * sum(groups for _, groups, _ in roles)

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(out).launch(grid=[3, 1, 1], block=[self.threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        def role(number):
            return lambda wg: self.write(out, Int32(1000 * number) + wg * 100 + tk.warp_id() % 4)

        tk.assign(tuple(tk.Role(role(i), registers, groups, warps)
                        for i, (registers, groups, warps) in enumerate(self.roles)))

    def write(self, out, value):
        out[cute.arch.block_idx()[0], cute.arch.thread_idx()[0]] = value


def build_roles(roles):
    kernel = Roles(roles)
    return kernel, (tensor("int32", 3, kernel.threads),)


class Scratch:
    """y = x, (128, 64) bf16, through the two tiles of 64 rows that a ring of one tile of 64 x 128 has room for, after
    that has been loaded from z."""

    def __init__(self):
        self.wide, self.half = tk.st(64, 128), tk.st(64, 64)

    @cute.jit
    def __call__(self, x: cute.Tensor, z: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, tk.gl.load(z, self.wide), tk.gl.store(y, self.half)).launch(
            grid=[1, 1, 1], block=[128, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, x: cute.Tensor, z: tk.gl, y: tk.gl):
        al = tk.SharedAllocator()
        ring, full = al.tile(self.wide), al.semaphores()
        tk.init_block(lambda: tk.init(full, 1))
        if tk.warp_id() == 0:
            tk.expect_bytes(full, self.wide.bytes)
            tk.load_async(ring[0], z, (0, 0), full)
        tk.wait(full, 0)
        halves = ring.scratch(self.half)
        for i in cutlass.range_constexpr(2):
            regs = tk.rt_bf(64)
            get(regs, x, 64 * i)
            tk.store(halves[i], regs)
        tk.publish()
        tk.sync_block()
        if tk.warp_id() == 0:
            for i in cutlass.range_constexpr(2):
                tk.store_async(y, halves[i], (i, 0))
            tk.store_wait()


def build_scratch():
    return Scratch(), (tensor("bf16", 128, 64), tensor("bf16", 64, 128), tensor("bf16", 128, 64))
