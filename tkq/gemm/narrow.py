"""out = f(A @ B) for few rows of A: B streams by, once, through deep rings. wgmma's 64 rows are 64 columns of B."""
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from .. import tile as tk
from . import epilogue_tile as ep
from . import operands
from .narrow_plan import STEP, NarrowConfig
from .spec import GemmSpec

GROUP = 8  # columns of an accumulator whose 4 numbers a thread sends together


@dataclass(frozen=True)
class Globals:
    a: tk.gl
    b: tk.gl  # N rows
    out: cute.Tensor  # (N, M)
    inputs: ep.Inputs  # c is (N, M) too
    steps: Int32  # of K


@dataclass(frozen=True)
class Shared:
    a: tk.SharedTile  # a ring of stages
    b: tk.SharedTile
    pipe: tk.Pipe
    exchange: Any  # (numbers, senders): what the other blocks of the cluster send; None where there are none
    sent: tk.Semaphore


class NarrowGemm:
    """A cluster makes ``rows`` columns of the result, of all of A's rows; each of its ``split`` blocks takes part of K.

    Roles:
      warpgroups 0 ..   64 of B's columns each: for each step of K, wait for its stage, wgmma, release the last one
      the last warp     for each step of K: acquire a stage, load B's and A's tile into it

    Then the cluster adds up. Each of ``reducers`` blocks has some of A's rows; all consumers' threads of the other
    blocks send it theirs (st.async, 4 numbers of a thread to the same thread), and it adds them to its own in an order
    that is fixed: the same sum every time. It applies the epilogue and stores.

    Pipeline, ``stages`` deep:
      full[i]    1 arrival, the producer's, and the bytes of both tiles
      empty[i]   one arrival a consumer warp: 4 x consumers
    sent         1 arrival, and the bytes of all that comes from other blocks

    Two blocks share a processor, so that one's beginning and end run under the other's stream.
    """

    def __init__(self, spec: GemmSpec, config: NarrowConfig):
        self.spec, self.config, self.epilogue = spec, config.check(spec), spec.epilogue
        x, dtype = config, tk.element_type(spec.dtype)
        by_rows = spec.b_major == "k"
        self.a_tile = tk.st(x.m, STEP, dtype)
        self.b_tile = tk.st(x.rows, STEP, dtype) if by_rows else tk.st(STEP, x.rows, dtype)
        self.mma = tk.mma_ABt if by_rows else tk.mma_AtBt
        self.cols = x.m // x.reducers  # of an accumulator, in the end

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, bias, c, alpha: Float32, beta: Float32,
                 blocks: Int32, stream: cuda.CUstream):
        x = self.config
        residual = None if const_expr(c is None) else operands.matrix(c, transpose=True)
        g = Globals(
            a=tk.gl.load(a, self.a_tile), b=tk.gl.load(operands.weights(b, self.spec), self.b_tile),
            out=operands.matrix(out, transpose=True), inputs=ep.Inputs(bias, residual, alpha, beta),
            steps=cute.ceil_div(a.shape[1], STEP))
        tiles = cute.ceil_div(out.shape[1], x.rows)
        self.kernel(g).launch(grid=[tiles * x.split, 1, 1], block=[x.threads, 1, 1], cluster=[x.split, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        x = self.config
        al = tk.SharedAllocator()
        s = Shared(
            a=al.tile(self.a_tile, x.stages), b=al.tile(self.b_tile, x.stages),
            pipe=al.pipe(x.stages, self.a_tile.bytes + self.b_tile.bytes, 4 * x.consumers),
            exchange=al.vector(x.rows * self.cols, x.split - 1) if x.split > 1 else None, sent=al.semaphores())
        tk.init_block(lambda: self.init(s), x.split)
        rank = tk.cluster_rank() if const_expr(x.split > 1) else Int32(0)
        first, end = g.steps * rank // x.split, g.steps * (rank + 1) // x.split
        row = cute.arch.block_idx()[0] // x.split
        if tk.warp_id() == 4 * x.consumers:
            self.produce(g, s, row, first, end)
        else:
            self.consume(g, s, row, end - first, rank)
        if const_expr(x.split > 1):
            tk.cluster_sync()  # nobody leaves while another may still write to it

    def init(self, s):
        s.pipe.init()
        tk.init(s.sent, 1)

    @cute.jit
    def produce(self, g, s: Constexpr, row, first, end):
        r = s.pipe.ring()
        for k in cutlass.range(first, end, unroll=1):
            sem = s.pipe.acquire(r)
            tk.load_async(s.b[r.stage], g.b, (row, k) if const_expr(self.spec.b_major == "k") else (k, row), sem)
            tk.load_async(s.a[r.stage], g.a, (0, k), sem)
            r.advance()

    @cute.jit
    def consume(self, g, s: Constexpr, row, steps, rank):
        x = self.config
        wg = tk.warpgroup_id()
        n = row * x.rows + wg * 64  # this warpgroup's first column of the result
        acc, bias = tk.rt_fl(x.m), None
        tk.zero(acc)
        if const_expr(self.epilogue.bias):
            bias = tk.rv()
            tk.load_rows(bias, g.inputs.bias, n, cute.size(g.inputs.bias))
        self.multiply(s, acc, steps, wg)
        if const_expr(x.split == 1):
            self.store(g, acc, bias, n, 0)
        else:
            if tk.warp_id() == 0 and rank < x.reducers:
                tk.expect_bytes(s.sent, x.exchange_bytes)
            for part in cutlass.range_constexpr(x.reducers):
                if rank != part:
                    self.send(s, acc, part, (rank - part + x.split - 1) % x.split)
            for part in cutlass.range_constexpr(x.reducers):
                if rank == part:
                    tk.wait(s.sent, 0)
                    self.receive(s, acc, part)
                    self.store(g, tk.columns(acc, part * self.cols, self.cols), bias, n, part * self.cols)

    @cute.jit
    def multiply(self, s: Constexpr, acc: Constexpr, steps, wg):
        full, done = s.pipe.ring(), s.pipe.ring()
        for i in cutlass.range(steps, unroll=1):
            s.pipe.wait(full)
            self.mma(acc, s.b[full.stage], s.a[full.stage], a_part=wg)
            full.advance()
            if i > 0:
                tk.mma_wait(1)
                s.pipe.release(done)
                done.advance()
        tk.mma_wait(0)

    # ---- adding up: 4 numbers of each thread and 8 columns, to the same thread of another block

    def places(self, part):
        """(number of the accumulator's first of 4, the same in what is exchanged) for each 8 columns of a part."""
        threads = 128 * self.config.consumers
        return [(part * self.cols // 2 + 4 * i, 4 * threads * i) for i in range(self.cols // GROUP)]

    @cute.jit
    def send(self, s: Constexpr, acc: Constexpr, part: Constexpr[int], slot):
        x = self.config
        for i in cutlass.range_constexpr(self.cols // GROUP):
            element, place = self.places(part)[i]
            to = s.exchange.iterator + (slot * (x.rows * self.cols) + place + 4 * cute.arch.thread_idx()[0])
            values = [acc.tensor[element + e] for e in range(4)]
            tk.store_remote(cute.make_ptr(Float32, to.toint(), to.memspace, assumed_align=16), values, s.sent, part)

    @cute.jit
    def receive(self, s: Constexpr, acc: Constexpr, part: Constexpr[int]):
        for slot in cutlass.range_constexpr(self.config.split - 1):
            for i in cutlass.range_constexpr(self.cols // GROUP):
                element, place = self.places(part)[i]
                for e in cutlass.range_constexpr(4):
                    got = s.exchange[place + 4 * cute.arch.thread_idx()[0] + e, slot]
                    acc.tensor[element + e] = acc.tensor[element + e] + got

    def store(self, g, acc, bias, n, m):
        """The epilogue of some columns of the accumulator, which are rows of the result from m on."""
        e, x, c = self.epilogue, tk.rt_fl(acc.cols), None
        if e.residual:
            c = tk.rt_fl(acc.cols)
            ep.load_residual(c, g.inputs.residual, ep.Place(n, Int32(m)), False)
        ep.linear(x, acc, e, g.inputs, bias, c)
        ep.activate(x, e, (x,), ep.Place(Int32(m), n), transposed=True)
        tk.store_elements(g.out, x, n, m)


def build(spec: GemmSpec, config: NarrowConfig):
    """(kernel, fake arguments): as ``dense.build``, but ``blocks`` is not used: the grid is what the sizes make it."""
    return NarrowGemm(spec, config), (*operands.fakes(spec), Int32(1))
