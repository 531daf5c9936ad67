"""Global memory: TMA of every rank with clipping, adds, multicast, bulk copies, and element by element."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

import tkq.tile as tk

from .common import any_strides, one_block, sym, tensor


class TmaCopy:
    """y = x, or y += x, tile by tile: x, y ([batch,] [depth,] rows, cols), one block a tile of x.

    Either may end before the other: what then comes in, or goes out, is what TMA makes of it."""

    def __init__(self, tile, rank, add):
        self.tile, self.rank, self.add = tile, rank, add

    def tma_order(self, x):
        """(batch, depth, rows, cols) to (rows, cols, depth, batch)"""
        modes = [self.rank - 2, self.rank - 1, *range(self.rank - 3, -1, -1)]
        return cute.make_tensor(x.iterator, cute.select(x.layout, modes))

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        x, y = self.tma_order(x), self.tma_order(y)
        dst = tk.gl.add(y, self.tile) if self.add else tk.gl.store(y, self.tile)
        self.kernel(tk.gl.load(x, self.tile), dst, self.depth(x)).launch(
            grid=self.grid(x), block=[64, 1, 1], stream=stream)

    def depth(self, x):
        return x.shape[2] if self.rank > 2 else Int32(1)

    def grid(self, x):
        rest = self.depth(x) * (x.shape[3] if self.rank > 3 else 1)
        return [cute.ceil_div(x.shape[0], self.tile.rows), cute.ceil_div(x.shape[1], self.tile.cols), rest]

    @cute.kernel
    def kernel(self, src: tk.gl, dst: tk.gl, depth: Int32):
        al = tk.SharedAllocator()
        tile, full = al.tile(self.tile)[0], al.semaphores()
        tk.init_block(lambda: tk.init(full, 1))
        row, col, rest = cute.arch.block_idx()
        coord = ((), (rest,), (rest // depth, rest % depth))[self.rank - 2] + (row, col)
        if tk.warp_id() == 0:
            tk.expect_bytes(full, self.tile.bytes)
            tk.load_async(tile, src, coord, full)
        tk.wait(full, 0)
        if tk.warp_id() == 1:
            tk.store_async(dst, tile, coord)
            tk.store_wait(0, read=False)


def build_tma(dtype, rank, rows, cols, swizzle=None, add=False):
    def fake():
        shape = tuple(sym() for _ in range(rank))
        strides = tuple(cute.sym_int64(divisibility=128 // type.width) for _ in range(rank - 1)) + (1,)
        return cute.runtime.make_fake_tensor(type, shape, strides, assumed_align=16)

    type = tk.element_type(dtype)
    return TmaCopy(tk.st(rows, cols, type, swizzle), rank, add), (fake(), fake())


class Pieces:
    """y[first + r, h] = x[first + r, h] for r < size: one piece of the rows of x and y (rows, heads, cols), ``pack``
    heads between each other in a tile. Tiles of y are cut off at the piece's end, and where pack is 1 those of x. What
    a tile brought in goes to seen (tiles, heads / pack, tile rows, cols)."""

    def __init__(self, tile, pack):
        self.tile, self.pack = tile, pack

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, seen: cute.Tensor, first: Int32, size: Int32,
                 stream: cuda.CUstream):
        heads = x.shape[1] // self.pack
        x, y = (cute.make_tensor(t.iterator, cute.select(t.layout, [0, 2, 1])) for t in (x, y))
        x = tk.ragged(x) if self.pack == 1 else tk.packed(x, self.pack)
        seen = cute.make_tensor(seen.iterator, cute.select(seen.layout, [2, 3, 1, 0]))
        self.kernel(tk.gl.load(x, self.tile), tk.gl.store(tk.packed(tk.ragged_store(y), self.pack), self.tile),
                    tk.gl.store(seen, self.tile), first, size).launch(
            grid=[seen.shape[3], heads, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: tk.gl, y: tk.gl, seen: tk.gl, first: Int32, size: Int32):
        al = tk.SharedAllocator()
        tile, full = al.tile(self.tile)[0], al.semaphores()
        tk.init_block(lambda: tk.init(full, 1))
        row, head, _ = cute.arch.block_idx()
        if tk.warp_id() == 0:
            tk.expect_bytes(full, self.tile.bytes)
            if cutlass.const_expr(self.pack == 1):
                tk.load_async(tile, x.part(size), (first + size, head, row, 0), full)
            else:
                tk.load_async(tile, x.rows_from(first), (head, row, 0), full)
        tk.wait(full, 0)
        if tk.warp_id() == 1:
            tk.store_async(y.part(size), tile, (first + size, head, row, 0))
            tk.store_async(seen, tile, (row, head, 0, 0))
            tk.store_wait(0, read=False)


def build_pieces(rows, cols, pack):
    def three(cols=cols):
        shape = sym(), heads, cols
        return cute.runtime.make_fake_tensor(
            tk.element_type("bf16"), shape, (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1),
            assumed_align=16)

    heads = sym()
    return Pieces(tk.st(rows, cols), pack), (
        three(), three(), tensor("bf16", sym(), sym(), rows, cols), Int32(0), Int32(0))


class Multicast:
    """Every block of a cluster gets all tiles of x (n, cols) and writes them to its part of y (cluster, n, cols)."""

    def __init__(self, tile, cluster, stages):
        self.tile, self.cluster, self.stages = tile, cluster, stages

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        y = cute.make_tensor(y.iterator, cute.select(y.layout, [1, 2, 0]))
        src, dst = tk.gl.load(x, self.tile, self.cluster), tk.gl.store(y, self.tile)
        self.kernel(src, dst, cute.ceil_div(x.shape[0], self.tile.rows)).launch(
            grid=[self.cluster, 1, 1], block=[256, 1, 1], cluster=[self.cluster, 1, 1], stream=stream,
            min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, src: tk.gl, dst: tk.gl, tiles: Int32):
        al = tk.SharedAllocator()
        ring = al.tile(self.tile, self.stages)
        pipe = al.pipe(self.stages, self.tile.bytes, 4, self.cluster)
        tk.init_block(pipe.init, self.cluster)
        tk.specialise(lambda: self.produce(src, ring, pipe, tiles), lambda wg: self.consume(dst, ring, pipe, tiles), 1)
        tk.cluster_sync()

    @cute.jit
    def produce(self, src, ring, pipe, tiles):
        r = pipe.ring()
        for i in cutlass.range(tiles, unroll=1):
            sem = pipe.acquire(r)
            tk.load_async(ring[r.stage], src, (i, 0), sem)
            r.advance()

    @cute.jit
    def consume(self, dst, ring, pipe, tiles):
        r = pipe.ring()
        for i in cutlass.range(tiles, unroll=1):
            pipe.wait(r)
            if tk.first_warp_of_group():
                tk.store_async(dst, ring[r.stage], (tk.cluster_rank(), i, 0))
                tk.store_wait()
            tk.sync(1, tk.WARPGROUP)
            pipe.release(r)
            r.advance()
        tk.store_wait()


def build_multicast(dtype, rows, cols, cluster, stages):
    n = sym()
    return Multicast(tk.st(rows, cols, tk.element_type(dtype)), cluster, stages), (
        tensor(dtype, n, cols), tensor(dtype, cluster, n, cols))


def build_bulk(n, evict_first=False):
    """x (n,) fp32 to shared memory, + 1; from there stored to y, added to z. w (4 * 128) += 1, 2, 3, 4, twice.

    counts (128,): what each thread got from a counter that runs to 99 and begins again."""
    @cute.jit
    def body(x, y, z, w, counter, counts):
        al = tk.SharedAllocator()
        buffer, full = al.vector(n), al.semaphores()
        tk.init_block(lambda: tk.init(full, 1))
        if tk.warp_id() == 0:
            tk.expect_bytes(full, 4 * n)
            with cute.arch.elect_one():
                tk.bulk_load(buffer.iterator.toint(), x.iterator.toint(), 4 * n, full.ptr.toint(), evict_first)
        tk.wait(full, 0)
        me = tk.thread_in_warpgroup()
        for i in cutlass.range_constexpr(n // 128):  # what a thread writes must be published
            buffer[i * 128 + me, 0] = buffer[i * 128 + me, 0] + 1.0
        tk.publish()
        tk.sync_block()
        if tk.warp_id() == 0:
            with cute.arch.elect_one():
                tk.bulk_store(y.iterator.toint(), buffer.iterator.toint(), 4 * n)
                tk.bulk_add(z.iterator.toint(), buffer.iterator.toint(), 4 * n)
                tk.bulk_commit()
                tk.store_wait(0, read=False)
        for _ in cutlass.range_constexpr(2):
            tk.red_add4((w.iterator + 4 * me).toint(), 1.0, 2.0, 3.0, 4.0)
        counts[me] = Int32(tk.count_up(counter.iterator.toint(), Uint32(99)))

    return one_block(body, (tensor("fp32", n), tensor("fp32", n), tensor("fp32", n), tensor("fp32", 512),
                             tensor("int32", 1), tensor("int32", 128)))


def build_copy_async(stages):
    """y = 2 * x, (iterations, 32) fp32 at any stride: a producer warp's cp.async, a ring, one consumer warp."""
    @cute.jit
    def produce(x, buffer, pipe):
        r = pipe.ring()
        for i in cutlass.range(cute.size(x, mode=[0]), unroll=1):
            sem = pipe.acquire(r)
            tk.copy_async(buffer, (tk.lane_id(), r.stage), x, (i, tk.lane_id()))
            tk.copy_async_arrive(sem)
            r.advance()

    @cute.jit
    def consume(y, buffer, pipe):
        r = pipe.ring()
        for i in cutlass.range(cute.size(y, mode=[0]), unroll=1):
            pipe.wait(r)
            y[i, tk.lane_id()] = buffer[tk.lane_id(), r.stage] * 2.0
            pipe.release(r)
            r.advance()

    @cute.jit
    def body(x, y):
        al = tk.SharedAllocator()
        buffer, pipe = al.vector(32, stages), al.pipe(stages, 0, 1, copies=32)
        tk.init_block(pipe.init)
        if tk.warp_id() == 0:
            produce(x, buffer, pipe)
        else:
            consume(y, buffer, pipe)

    n = sym()
    return one_block(body, (any_strides("fp32", n, 32), tensor("fp32", n, 32)), 64)


class Elements:
    """y (rows, cols) = x[row0 :, col0 :], zeros past x's end: load_elements, then TMA."""

    def __init__(self, tile, threads):
        self.tile, self.threads = tile, threads

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, row0: Int32, col0: Int32, stream: cuda.CUstream):
        self.kernel(x, tk.gl.store(y, self.tile), row0, col0).launch(
            grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: tk.gl, row0: Int32, col0: Int32):
        tile = tk.SharedAllocator().tile(self.tile)[0]
        tk.load_elements(tile, x, row0, col0, self.threads, cute.arch.thread_idx()[0])
        tk.publish()
        tk.sync_block()
        if tk.warp_id() == 0:
            tk.store_async(y, tile, (0, 0))
        tk.store_wait()


def build_elements(dtype, rows, cols, threads):
    return Elements(tk.st(rows, cols, tk.element_type(dtype)), threads), (
        any_strides(dtype, sym(), sym()), tensor(dtype, rows, cols), Int32(0), Int32(0))
