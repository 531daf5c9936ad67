"""Blocks that meet: the grid's barrier, and stores into another block of the cluster."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

import tkq.tile as tk

from .common import sym, tensor


class GridSum:
    """out[b] = sum of x, by every block b: each leaves its element in ``between``, and adds up all of them after the
    barrier, from the last to the first."""

    @cute.jit
    def __call__(self, x: cute.Tensor, between: cute.Tensor, out: cute.Tensor, counter: cute.Tensor,
                 stream: cuda.CUstream):
        self.kernel(x, between, out, counter).launch(grid=[x.shape[0], 1, 1], block=[32, 1, 1], stream=stream,
                                                     cooperative=True)

    @cute.kernel
    def kernel(self, x: cute.Tensor, between: cute.Tensor, out: cute.Tensor, counter: cute.Tensor):
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if tk.lane_id() == 0:
            between[block] = x[block]
            tk.grid_arrive(counter.iterator.toint(), blocks)
            tk.grid_wait(counter.iterator.toint(), blocks)
            total = Float32(0)
            for i in cutlass.range(blocks, unroll=1):
                total = total + between[blocks - 1 - i]
            out[block] = total


def build_grid():
    n = sym()
    return GridSum(), (tensor("fp32", n), tensor("fp32", n), tensor("fp32", n), tensor("int32", 1))


class LastSum:
    """tickets[b] = how many blocks came before block b; total[0] = sum of x, by the block that came last."""

    @cute.jit
    def __call__(self, x: cute.Tensor, between: cute.Tensor, tickets: cute.Tensor, total: cute.Tensor,
                 counter: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, between, tickets, total, counter).launch(grid=[x.shape[0], 1, 1], block=[32, 1, 1],
                                                                stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, between: cute.Tensor, tickets: cute.Tensor, total: cute.Tensor,
               counter: cute.Tensor):
        block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if tk.lane_id() == 0:
            between[block] = x[block]
            ticket = tk.grid_ticket(counter.iterator.toint(), blocks)
            tickets[block] = Int32(ticket)
            if ticket == Uint32(blocks - 1):
                sum = Float32(0)
                for i in cutlass.range(blocks, unroll=1):
                    sum = sum + between[i]
                total[0] = sum


def build_ticket():
    n = sym()
    return LastSum(), (tensor("fp32", n), tensor("fp32", n), tensor("int32", n), tensor("fp32", 1), tensor("int32", 1))


class StoreRemote:
    """out[b, c] = the ``floats`` values x[c] of block c, as block b of the cluster got them."""

    def __init__(self, cluster, floats):
        self.cluster, self.floats = cluster, floats

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, out).launch(grid=[self.cluster, 1, 1], block=[32, 1, 1], cluster=[self.cluster, 1, 1],
                                   stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        al = tk.SharedAllocator()
        got, full = al.vector(self.floats, self.cluster), al.semaphores()
        tk.init_block(lambda: tk.init(full, 1), self.cluster)
        me = tk.cluster_rank()
        tk.expect_bytes(full, 4 * self.floats * self.cluster)
        if tk.lane_id() < self.cluster:
            values = [x[me, i] for i in range(self.floats)]
            tk.store_remote(got[None, me].iterator, values, full, tk.lane_id())
        tk.wait(full, 0)
        if tk.lane_id() < self.cluster:
            for i in cutlass.range_constexpr(self.floats):
                out[me, Int32(tk.lane_id()), i] = got[i, tk.lane_id()]
        tk.cluster_sync()


def build_store_remote(cluster, floats):
    return StoreRemote(cluster, floats), (tensor("fp32", cluster, floats), tensor("fp32", cluster, cluster, floats))


class BulkSend:
    """out[turn, b] = (turn + 1) * x[of the other block], through shared memory that each block writes anew when the
    other says that it has read what came before."""

    turns = 3

    def __init__(self, floats):
        self.floats = floats

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, out).launch(grid=[2, 1, 1], block=[32, 1, 1], cluster=[2, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        al = tk.SharedAllocator()
        mine, theirs = al.vector(self.floats, 1), al.vector(self.floats, 1)
        full, empty = al.semaphores(), al.semaphores()

        def initialise():
            tk.init(full, 1)
            tk.init(empty, 1)

        tk.init_block(initialise, 2)
        me = tk.cluster_rank()
        for turn in cutlass.range_constexpr(self.turns):
            tk.expect_bytes(full, 4 * self.floats)
            for i in cutlass.range(tk.lane_id(), self.floats, 32, unroll=1):
                mine[i, 0] = x[me, i] * (turn + 1.0)
            tk.publish()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                tk.bulk_send(theirs.iterator.toint(), mine.iterator.toint(), 4 * self.floats, full.ptr.toint(), me ^ 1)
            tk.wait(full, turn % 2)
            for i in cutlass.range(tk.lane_id(), self.floats, 32, unroll=1):
                out[turn, me, i] = theirs[i, 0]
            cute.arch.sync_warp()
            tk.arrive_at(empty, me ^ 1)
            tk.wait(empty, turn % 2)  # the other one has read what went there
        tk.cluster_sync()


def build_bulk_send(floats):
    return BulkSend(floats), (tensor("fp32", 2, floats), tensor("fp32", BulkSend.turns, 2, floats))
