"""Register tiles to and from shared tiles, and shared tiles to and from global memory."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

import tkq.tile as tk

from .common import get, put, tensor


class RoundTrip:
    """x -> registers -> store -> TMA -> stored; and stored's shared tile -> load -> registers -> loaded.

    x: (64, cols) of the register type; stored: (64, cols) of the shared type, transposed for store_T and load_T."""

    def __init__(self, cols, src, dst, swizzle, transposed):
        self.cols, self.src, self.transposed = cols, tk.element_type(src), transposed
        shape = (cols, 64) if transposed else (64, cols)
        self.type = tk.st(*shape, tk.element_type(dst), swizzle)

    @cute.jit
    def __call__(self, x: cute.Tensor, stored: cute.Tensor, loaded: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, tk.gl.store(stored, self.type), loaded).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream,
                                                             min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, x: cute.Tensor, stored: tk.gl, loaded: cute.Tensor):
        tile = tk.SharedAllocator().tile(self.type, 2)[1]
        regs = tk.rt(self.cols, self.src)
        get(regs, x)
        if cutlass.const_expr(self.transposed):
            tk.store_T(tile, regs)
        else:
            tk.store(tile, regs)
        tk.publish()
        tk.sync_block()
        if tk.first_warp_of_group():
            tk.store_async(stored, tile, (0, 0))
        back = tk.rt(self.cols, self.type.dtype)
        if cutlass.const_expr(self.transposed):
            tk.load_T(back, tile)
        else:
            tk.load(back, tile)
        if cutlass.const_expr(self.type.dtype.width == 16):
            tk.arrived(back)
        put(loaded, back)
        tk.store_wait()


def build_round_trip(cols, src, dst, swizzle=None, transposed=False):
    shape = (cols, 64) if transposed else (64, cols)
    return RoundTrip(cols, src, dst, swizzle, transposed), (
        tensor(src, 64, cols), tensor(dst, *shape), tensor(dst, 64, cols))


class Stacked:
    """y = x + 1, (128, cols) fp32: one TMA load of a high tile, seen as two of 64 rows, and stored as one."""

    def __init__(self, cols):
        self.low, self.high = tk.st(64, cols, cutlass.Float32), tk.st(128, cols, cutlass.Float32)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(tk.gl.load(x, self.high), tk.gl.store(y, self.high)).launch(grid=[1, 1, 1], block=[256, 1, 1],
                                                                                 stream=stream)

    @cute.kernel
    def kernel(self, x: tk.gl, y: tk.gl):
        al = tk.SharedAllocator()
        tiles, full, wg = al.tile(self.low, 4), al.semaphores(), tk.warpgroup_id()
        high = tiles.stacked(2)[1]
        tk.init_block(lambda: tk.init(full, 1))
        if tk.warp_id() == 0:
            tk.expect_bytes(full, self.high.bytes)
            tk.load_async(high, x, (0, 0), full)
        tk.wait(full, 0)
        regs = tk.rt_fl(self.low.cols)
        tk.load(regs, tiles[2 + wg])
        tk.add(regs, regs, 1.0)
        tk.store(tiles[2 + wg], regs)
        tk.publish()
        tk.sync_block()
        if tk.warp_id() == 0:
            tk.store_async(y, high, (0, 0))
            tk.store_wait()


def build_stacked(cols):
    return Stacked(cols), (tensor("fp32", 128, cols), tensor("fp32", 128, cols))


class Panels:
    """z = x and y = x with its panels in reversed order, (64, cols) bf16: a tile whose panels come and leave by
    themselves."""

    def __init__(self, cols):
        self.tile, self.part = tk.st(64, cols), tk.st(64, 64)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, stream: cuda.CUstream):
        self.kernel(tk.gl.load(x, self.part), tk.gl.store(y, self.part), z).launch(
            grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: tk.gl, y: tk.gl, z: cute.Tensor):
        al = tk.SharedAllocator()
        tile, full, count = al.tile(self.tile, 2)[1], al.semaphores(), self.tile.cols // 64
        tk.init_block(lambda: tk.init(full, 1))
        if tk.warp_id() == 0:
            tk.expect_bytes(full, self.tile.bytes)
            for n in cutlass.range_constexpr(count):
                tk.load_async(tile.panel(n), x, (0, n), full)
        tk.wait(full, 0)
        regs = tk.rt_bf(self.tile.cols)
        tk.load(regs, tile)
        put(z, regs)
        if tk.warp_id() == 0:
            for n in cutlass.range_constexpr(count):
                tk.store_async(y, tile.panel(n), (0, count - 1 - n))
            tk.store_wait()


def build_panels(cols):
    return Panels(cols), tuple(tensor("bf16", 64, cols) for _ in range(3))
