"""Which role waits for which: rings and pipes, mailboxes, turns, barriers of a block and of a cluster."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk

from .common import one_block, put, sym, tensor


class PipeSum:
    """out[wg] = sum over i of (i + 1) * x[i], x (n, 64, 32) fp32: TMA by a producer warp; each consumer adds all."""

    tile_rows, tile_cols = 64, 32

    def __init__(self, stages, consumers, registers=()):
        self.stages, self.consumers, self.registers = stages, consumers, registers

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        x = cute.make_tensor(x.iterator, cute.select(x.layout, [1, 2, 0]))
        g = tk.gl.load(x, tk.st(self.tile_rows, self.tile_cols, tk.element_type("fp32")))
        self.kernel(g, x.shape[2], out).launch(grid=[1, 1, 1], block=[128 * (1 + self.consumers), 1, 1], stream=stream,
                                               min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, x: tk.gl, n: Int32, out: cute.Tensor):
        al = tk.SharedAllocator()
        tiles = al.tile(x.type, self.stages)
        pipe = al.pipe(self.stages, x.type.bytes, 4 * self.consumers)
        tk.init_block(pipe.init)
        tk.specialise(lambda: self.produce(x, n, tiles, pipe), lambda wg: self.consume(n, tiles, pipe, out, wg),
                      self.consumers, self.registers)

    @cute.jit
    def produce(self, x, n, tiles, pipe):
        r = pipe.ring()
        for i in cutlass.range(n, unroll=1):
            sem = pipe.acquire(r)
            tk.load_async(tiles[r.stage], x, (i, 0, 0), sem)
            r.advance()

    @cute.jit
    def consume(self, n, tiles, pipe, out, wg):
        r, acc, t = pipe.ring(), tk.rt_fl(self.tile_cols), tk.rt_fl(self.tile_cols)
        tk.zero(acc)
        for i in cutlass.range(n, unroll=1):
            pipe.wait(r)
            tk.load(t, tiles[r.stage])
            pipe.release(r)
            tk.mul(t, t, cutlass.Float32(i + 1))
            tk.add(acc, acc, t)
            r.advance()
        put(out[wg, None, None], acc)


def build_pipe(stages, consumers, registers=()):
    n = sym()
    return PipeSum(stages, consumers, registers), (tensor("fp32", n, 64, 32), tensor("fp32", consumers, 64, 32))


def build_commit(stages, producers):
    """y = -x, (n, 32 * producers) fp32: producer warps store into the stages themselves, one warp drains them."""
    width = 32 * producers

    @cute.jit
    def produce(x, buffer, pipe, me):
        r = pipe.ring()
        for i in cutlass.range(cute.size(x, mode=[0]), unroll=1):
            pipe.acquire_empty(r)
            buffer[me, r.stage] = x[i, me]
            pipe.commit(r)
            r.advance()

    @cute.jit
    def consume(y, buffer, pipe):
        r = pipe.ring()
        for i in cutlass.range(cute.size(y, mode=[0]), unroll=1):
            pipe.wait(r)
            for j in cutlass.range_constexpr(producers):
                y[i, j * 32 + tk.lane_id()] = -buffer[j * 32 + tk.lane_id(), r.stage]
            pipe.release(r)
            r.advance()

    @cute.jit
    def body(x, y):
        al = tk.SharedAllocator()
        buffer, pipe = al.vector(width, stages), al.pipe(stages, 0, 1, producers=producers)
        tk.init_block(pipe.init)
        if tk.warp_id() < producers:
            produce(x, buffer, pipe, tk.thread_in_warpgroup())
        else:
            consume(y, buffer, pipe)

    n = sym()
    return one_block(body, (tensor("fp32", n, width), tensor("fp32", n, width)), width + 32)


class Producers:
    """y = -x, (n, 32 * warps) fp32, as ``build_commit``, with the roles that ``specialise`` gives: producer warps, and
    a warpgroup that drains."""

    stages = 2

    def __init__(self, warps):
        self.warps = warps

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(grid=[1, 1, 1], block=[256, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        al = tk.SharedAllocator()
        buffer = al.vector(32 * self.warps, self.stages)
        pipe = al.pipe(self.stages, 0, 4, producers=self.warps)
        tk.init_block(pipe.init)
        tk.specialise(lambda: self.produce(x, buffer, pipe), lambda wg: self.consume(y, buffer, pipe), 1,
                      producer_warps=self.warps)

    @cute.jit
    def produce(self, x, buffer, pipe):
        r, me = pipe.ring(), tk.thread_in_warpgroup()
        for i in cutlass.range(cute.size(x, mode=[0]), unroll=1):
            pipe.acquire_empty(r)
            buffer[me, r.stage] = x[i, me]
            pipe.commit(r)
            r.advance()

    @cute.jit
    def consume(self, y, buffer, pipe):
        r, me = pipe.ring(), tk.thread_in_warpgroup()
        for i in cutlass.range(cute.size(y, mode=[0]), unroll=1):
            pipe.wait(r)
            if me < 32 * self.warps:
                y[i, me] = -buffer[me, r.stage]
            pipe.release(r)
            r.advance()


def build_producers(warps):
    n, width = sym(), 32 * warps
    return Producers(warps), (tensor("fp32", n, width), tensor("fp32", n, width))


def build_mailbox(stages, warps):
    """A producer warp posts (i, x[i]) for each i, then (-1, 0); the others write what they take to out[warp, i]."""
    @cute.jit
    def produce(x, mail):
        r = mail.ring()
        for i in cutlass.range(cute.size(x), unroll=1):
            mail.post(r, i, x[i])
        mail.post(r, -1, 0)

    @cute.jit
    def consume(out, mail, me):
        r = mail.ring()
        i, value = mail.take(r)
        while i >= 0:
            if tk.lane_id() == 0:
                out[me, i] = value
            i, value = mail.take(r)

    @cute.jit
    def body(x, out):
        mail = tk.SharedAllocator().mailbox(2, stages, warps)
        tk.init_block(mail.init)
        if tk.warp_id() == 0:
            produce(x, mail)
        else:
            consume(out, mail, tk.warp_id() - 1)

    n = sym()
    return one_block(body, (tensor("int32", n), tensor("int32", warps, n, divisor=1)), 32 * (warps + 1))


def build_turns(groups, enabled=True):
    """out[wg, i] = the how many-th turn it was: without a lock, so that only turns keep the count right."""
    @cute.jit
    def rounds(out, count, turns, wg):
        turns.start()
        for i in cutlass.range(cute.size(out, mode=[1]), unroll=1):
            turns.take()
            if tk.thread_in_warpgroup() == 0:
                out[wg, i] = count[0, 0]
                count[0, 0] = count[0, 0] + 1
            turns.give()

    @cute.jit
    def body(out):
        count, wg = tk.SharedAllocator().vector(1, dtype=Int32), tk.warpgroup_id()
        if tk.thread_in_warpgroup() == 0:
            count[0, 0] = Int32(0)
        tk.sync_block()
        rounds(out, count, tk.PingPong(groups, wg, enabled), wg)
        if cutlass.const_expr(enabled and groups > 1):
            if wg == 0:
                tk.sync(2, 2 * tk.WARPGROUP)  # the last one's give

    return one_block(body, (tensor("int32", groups, sym(), divisor=1),), 128 * groups)


def build_no_turns():
    """out[wg, i] = i, by two warpgroups that take turns as often as they like and never give: turns that are not
    enabled wait for no other."""
    @cute.jit
    def body(out):
        wg = tk.warpgroup_id()
        turns = tk.PingPong(2, wg, False)
        turns.start()
        for i in cutlass.range(cute.size(out, mode=[1]), unroll=1):
            turns.take()
            if wg == 1:
                turns.take()
            if tk.thread_in_warpgroup() == 0:
                out[wg, i] = i

    return one_block(body, (tensor("int32", 2, sym(), divisor=1),), 256)


def build_named_barrier():
    """out = x, two halves swapped between two warpgroups, by sync_arrive and sync, and the block's barrier."""
    @cute.jit
    def body(x, out):
        buffer = tk.SharedAllocator().vector(256)
        me, wg = tk.thread_in_warpgroup(), tk.warpgroup_id()
        if wg == 0:
            buffer[me, 0] = x[me]
            tk.sync_arrive(5, 256)
        else:
            tk.sync(5, 256)
            out[128 + me] = buffer[127 - me, 0]
            buffer[128 + me, 0] = x[128 + me]
        tk.sync_block()
        if wg == 0:
            out[me] = buffer[255 - me, 0]

    return one_block(body, (tensor("fp32", 256), tensor("fp32", 256)), 256)


class ClusterExchange:
    """out[block] = 10 * the next block's x + the block's rank, through global memory and the cluster's barrier."""

    def __init__(self, cluster, split):
        self.cluster, self.split = cluster, split

    @cute.jit
    def __call__(self, x: cute.Tensor, between: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, between, out).launch(grid=[x.shape[0], 1, 1], block=[128, 1, 1], cluster=[self.cluster, 1, 1],
                                            stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, between: cute.Tensor, out: cute.Tensor):
        block, me, rank = cute.arch.block_idx()[0], tk.thread_in_warpgroup(), tk.cluster_rank()
        between[block, me] = x[block, me]
        if cutlass.const_expr(self.split):
            tk.cluster_arrive_relaxed()  # nothing to see yet: only that all blocks run
            tk.cluster_wait()
            tk.cluster_arrive()
            tk.cluster_wait()
        else:
            tk.cluster_sync()
        following = block - rank + (rank + 1) % self.cluster
        value = cute.arch.load((between.iterator + following * 128 + me).llvm_ptr, cutlass.Float32, cop="cg")
        out[block, me] = value * 10.0 + cutlass.Float32(rank)


def build_cluster(cluster, split=False):
    n = sym(cluster)
    return ClusterExchange(cluster, split), tuple(tensor("fp32", n, 128) for _ in range(3))


def build_ring(stages, start):
    """out[i] = stage, phase after i steps from ``start``."""
    @cute.jit
    def body(out):
        r = tk.ring(stages, start)
        for i in cutlass.range(cute.size(out, mode=[0]), unroll=1):
            out[i, 0] = r.stage
            out[i, 1] = r.phase
            r.advance()

    return one_block(body, (tensor("int32", sym(), 2),), 32)


def build_semaphores():
    """out = x reversed, by bare semaphores: two arrivals a phase, one of them in a cluster of one; two phases."""
    @cute.jit
    def body(x, out):
        al = tk.SharedAllocator()
        buffer, full = al.vector(64), al.semaphores(2)

        def initialise():
            for i in range(2):
                tk.init(full[i], 2)

        tk.init_block(initialise)
        me = cute.arch.thread_idx()[0]
        if tk.warp_id() < 2:
            for phase in cutlass.range(2, unroll=1):
                buffer[me, 0] = x[phase * 64 + me]
                cute.arch.sync_warp()
                if tk.warp_id() == 0:
                    tk.arrive(full[0])
                else:
                    tk.arrive_cluster(full[0], 1)
                tk.wait(full[1], phase)
        else:
            for phase in cutlass.range(2, unroll=1):
                tk.wait(full[0], phase)
                out[127 - (phase * 64 + me - 64)] = buffer[me - 64, 0]
                cute.arch.sync_warp()
                tk.arrive(full[1])

    return one_block(body, (tensor("fp32", 128), tensor("fp32", 128)))


def build_who():
    """out[thread] = warp, warpgroup, lane, thread in warpgroup, first warp of group."""
    @cute.jit
    def body(out):
        me = cute.arch.thread_idx()[0]
        out[me, 0] = tk.warp_id()
        out[me, 1] = tk.warpgroup_id()
        out[me, 2] = tk.lane_id()
        out[me, 3] = tk.thread_in_warpgroup()
        out[me, 4] = Int32(tk.first_warp_of_group())

    return one_block(body, (tensor("int32", 384, 5),), 384)
