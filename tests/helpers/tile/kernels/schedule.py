"""Schedules by themselves, and the LCF template with each of them."""
from dataclasses import dataclass
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk

from .common import sym, tensor


class Deal:
    """done[i] += 1 by each block, and first[i] = its cluster's first block, for each task i dealt to it. capped: as
    many blocks as ``blocks_for`` says, else ``blocks`` clusters, though there be fewer tasks."""

    def __init__(self, kind, cluster, capped):
        self.kind, self.cluster, self.capped = kind, cluster, capped

    @cute.jit
    def __call__(self, done: cute.Tensor, first: cute.Tensor, counter: Optional[cute.Tensor], blocks: Int32,
                 stream: cuda.CUstream):
        order = tk.Schedule(done.shape[0], self.kind, self.cluster, counter)
        grid = blocks * self.cluster
        if cutlass.const_expr(self.capped):
            grid = tk.blocks_for(self.kind, order.tasks, blocks, self.cluster)
        self.kernel(order, done, first).launch(
            grid=[grid, 1, 1], block=[32, 1, 1], cluster=[self.cluster, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, order: tk.Schedule, done: cute.Tensor, first: cute.Tensor):
        al = tk.SharedAllocator()
        number_for_all = NumberForAll(self.cluster, al.vector(1, 1), al.semaphores(), al.semaphores())
        tk.init_block(number_for_all.init, self.cluster)
        turn, number, rank = tk.ring(1), order.first(), tk.cluster_rank()
        while number < order.tasks:
            fetched = order.fetch()
            if tk.lane_id() == 0:
                cute.arch.atomic_add((done.iterator + number).llvm_ptr, Int32(1))
                if rank == 0:
                    first[number] = cute.arch.block_idx()[0]
            number = order.following(number, fetched, lambda found: number_for_all.send(found, turn))
        tk.cluster_sync()  # no block leaves while another may still write to it


@dataclass(frozen=True)
class NumberForAll:
    """A cluster's first block sends the others a number: place, and semaphores (it is there, all have read it)."""

    cluster: Constexpr[int]
    place: cute.Tensor
    there: tk.Semaphore
    read: tk.Semaphore

    def init(self):
        tk.init(self.there, 1)
        tk.init(self.read, max(self.cluster - 1, 1))

    @cute.jit
    def send(self, number, turn):
        """From the first block's number to that of all. turn: a ring of one, how often it was sent."""
        if tk.cluster_rank() == 0:
            tk.wait(self.read, turn.phase ^ 1)
            if 0 < tk.lane_id() < self.cluster:
                tk.store_remote(self.place.iterator, (number.bitcast(Float32),), self.there, tk.lane_id())
        else:
            tk.expect_bytes(self.there, 4)
            tk.wait(self.there, turn.phase)
            number = self.place[0, 0].bitcast(Int32)
            cute.arch.sync_warp()
            tk.arrive_at(self.read, Int32(0))
        turn.advance()
        return number


def build_deal(kind, cluster=1, capped=True):
    n = sym()
    counter = tensor("int32", 1) if kind == "dynamic" else None
    return Deal(kind, cluster, capped), (tensor("int32", n), tensor("int32", n), counter, Int32(1))


@dataclass(frozen=True)
class Globals:
    a: tk.gl
    b: tk.gl
    c: tk.gl
    schedule: tk.Schedule
    rows: Int32
    cols: Int32
    iters: Int32


class Gemm(tk.LCF):
    """C = A @ B.T on the template."""

    a, b, c = tk.st(64, 64), tk.st(64, 64), tk.st(64, 64)

    def __init__(self, kind, consumers, stages, lag):
        self.kind, self.consumers, self.stages, self.lag = kind, consumers, stages, lag
        self.inputs, self.scratch = dict(a=(self.a, consumers), b=self.b), dict(c=(self.c, consumers))

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, counter: Optional[cute.Tensor], blocks: Int32,
                 stream: cuda.CUstream):
        rows, cols = cute.ceil_div(a.shape[0], 64 * self.consumers), cute.ceil_div(b.shape[0], 64)
        g = Globals(tk.gl.load(a, self.a), tk.gl.load(b, self.b), tk.gl.store(c, self.c),
                    self.order(rows * cols, counter), rows, cols, cute.ceil_div(a.shape[1], 64))
        self.kernel(g).launch(grid=[tk.blocks_for(self.kind, rows * cols, blocks), 1, 1],
                              block=[128 * (1 + self.consumers), 1, 1], stream=stream, min_blocks_per_mp=1)

    def order(self, tasks, counter):
        return tk.Schedule(tasks, self.kind, 1, counter)

    @cute.kernel
    def kernel(self, g: Globals):
        self.run(g)

    def task(self, g, number):
        return tk.Task(number % g.rows, number // g.rows, g.iters)

    def load(self, g, t, i, x, sem):
        for w in range(self.consumers):
            tk.load_async(x["a"][w], g.a, (t.row * self.consumers + w, i), sem)
        tk.load_async(x["b"][0], g.b, (t.col, i), sem)

    def start(self, g, t, wg):
        acc = tk.rt_fl(64)
        tk.zero(acc)
        return acc

    def compute(self, g, t, i, x, acc, wg):
        tk.mma_ABt(acc, x["a"][wg], x["b"][0])

    @cute.jit
    def finish(self, g, t, acc, s, wg):
        if tk.first_warp_of_group():
            tk.store_wait()
        tk.sync(8 + wg, tk.WARPGROUP)
        tk.store(s["c"][wg], acc)
        tk.publish()
        tk.sync(8 + wg, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(g.c, s["c"][wg], (t.row * self.consumers + wg, t.col))


class OwnSchedule(Gemm):
    """The same with a schedule of its own; the one in ``g`` has no task."""

    def order(self, tasks, counter):
        return tk.Schedule(Int32(0), "single")

    def schedule(self, g):
        return tk.Schedule(g.rows * g.cols, self.kind)


def build_own_schedule(kind, consumers=2, stages=3, lag=1):
    m, n, k = sym(), sym(), sym()
    return OwnSchedule(kind, consumers, stages, lag), (
        tensor("bf16", m, k), tensor("bf16", n, k), tensor("bf16", m, n), None, Int32(1))


def build_lcf(kind, consumers=2, stages=3, lag=1):
    m, n, k = sym(), sym(), sym()
    counter = tensor("int32", 1) if kind == "dynamic" else None
    return Gemm(kind, consumers, stages, lag), (
        tensor("bf16", m, k), tensor("bf16", n, k), tensor("bf16", m, n), counter, Int32(1))
