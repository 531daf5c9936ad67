"""out = f(A @ B) for small M: A and B are swapped, so that wgmma's 64 rows are 64 columns of B; B streams once through
deep rings, and a cluster splits K."""
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from ... import tile as tk
from ..epilogue import registers as ep
from . import operands
from .small_m_config import STEP, SmallMConfig
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
    b_parts: tk.SharedTile  # the same memory: gate and up of each stage, where b has them apart; otherwise b
    pipe: tk.Pipe
    exchange: Any  # (numbers, senders): what the other blocks of the cluster send; None where there are none
    sent: tk.Semaphore


class SmallMGemm:
    """A cluster makes ``rows`` columns of the result, of all of A's rows; each of its ``split`` blocks takes part of K.

    Roles:
      warpgroups 0 ..   64 of B's columns each, gated 64 of the gate and the same of up: for each step of K, wait for
                        its stage, wgmma, release the one before
      the last warp     for each step of K: acquire a stage, load B's and A's tile into it

    Then the cluster adds up. Each of ``reducers`` blocks has some of A's rows; all consumers' threads of the other
    blocks send it theirs (st.async, 4 numbers of a thread to the same thread), and it adds them to its own in an order
    that is fixed: the same sum every time. It applies the epilogue and stores.

    Pipeline, ``stages`` deep:
      full[i]    1 arrival, the producer's, and the bytes of both tiles
      empty[i]   one arrival a consumer warp: 4 x consumers
    sent         1 arrival, and the bytes of all that comes from other blocks

    Two blocks share an SM, so that one's beginning and end run under the other's stream.
    """

    def __init__(self, spec: GemmSpec, config: SmallMConfig):
        self.spec, self.config, self.epilogue = spec, config.check(spec), spec.epilogue
        x, dtype = config, tk.element_type(spec.dtype)
        by_rows = spec.b_major == "k"
        self.a_tile = tk.st(x.m, STEP, dtype)
        self.width = x.rows // x.parts  # columns of the result
        self.b_tile = tk.st(x.rows, STEP, dtype) if by_rows else tk.st(STEP, x.rows, dtype)
        self.b_part = tk.st(self.width, STEP, dtype) if by_rows else tk.st(STEP, self.width, dtype)
        self.mma = tk.mma_ABt if by_rows else tk.mma_AtBt
        self.cols = x.m // x.reducers  # of an accumulator, in the end

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, bias, c, alpha: Float32, beta: Float32,
                 blocks: Int32, stream: cuda.CUstream):
        x = self.config
        residual = None if const_expr(c is None) else operands.matrix(c, transpose=True)
        g = Globals(
            a=tk.gl.load(a, self.a_tile), b=tk.gl.load(operands.weights(b, self.spec), self.b_part),
            out=operands.matrix(out, transpose=True),
            inputs=ep.Inputs(operands.column_vector(bias, self.spec), residual, alpha, beta),
            steps=cute.ceil_div(a.shape[1], STEP))
        tiles = cute.ceil_div(out.shape[1], self.width)
        self.kernel(g).launch(grid=[tiles * x.split, 1, 1], block=[x.threads, 1, 1], cluster=[x.split, 1, 1],
                              stream=stream, min_blocks_per_mp=1)

    def fake_arguments(self) -> tuple:
        """What it is compiled for: as ``DenseGemm``, but ``blocks`` is not used: the grid is what the sizes make it."""
        return *operands.fakes(self.spec), Int32(1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        x = self.config
        al = tk.SharedAllocator()
        a, b = al.tile(self.a_tile, x.stages), al.tile(self.b_tile, x.stages)
        s = Shared(
            a=a, b=b, b_parts=operands.parts_of_tile(b, self.b_part, x.parts),
            pipe=al.pipe(x.stages, self.a_tile.bytes + self.b_tile.bytes, 4 * x.consumers),
            exchange=al.vector(x.rows * self.cols, x.split - 1) if x.split > 1 else None, sent=al.semaphores())
        tk.init_block(lambda: self.init(s), x.split)
        self.work(g, s)

    def place(self, g, cluster):
        """What it works on: some of g, and its columns of the result."""
        return g, cluster

    @cute.jit
    def work(self, g, s: Constexpr):
        """All roles, in a block whose pipeline is there."""
        x = self.config
        rank = tk.cluster_rank() if const_expr(x.split > 1) else Int32(0)
        first, end = g.steps * rank // x.split, g.steps * (rank + 1) // x.split
        g, row = self.place(g, cute.arch.block_idx()[0] // x.split)
        if tk.warp_id() == 4 * x.consumers:
            self.produce(g, s, row, first, end)
        else:
            self.consume(g, s, row, end - first, rank)
        if const_expr(x.split > 1):
            tk.cluster_sync()  # no block exits while another may still write to its shared memory

    def init(self, s):
        s.pipe.init()
        tk.init(s.sent, 1)

    @cute.jit
    def produce(self, g, s: Constexpr, row, first, end):
        r = s.pipe.ring()
        for k in cutlass.range(first, end, unroll=1):
            sem = s.pipe.acquire(r)
            at = (row, k) if const_expr(self.spec.b_major == "k") else (k, row)
            for part in cutlass.range_constexpr(self.config.parts):
                place = (part, *at) if const_expr(self.config.parts > 1) else at
                tk.load_async(s.b_parts[self.config.parts * r.stage + part], g.b, place, sem)
            tk.load_async(s.a[r.stage], g.a, (0, k), sem)
            r.advance()

    @cute.jit
    def consume(self, g, s: Constexpr, row, steps, rank):
        x = self.config
        wg = tk.warpgroup_id()
        n = row * self.width + wg * 64  # this warpgroup's first column of the result
        acc, vectors = [tk.rt_fl(x.m) for _ in range(x.parts)], self.row_vectors(g, n)
        for part in acc:
            tk.zero(part)
        self.multiply(s, acc, steps, wg)
        if const_expr(x.split == 1):
            self.store(g, acc, vectors, n, 0)
        else:
            if tk.warp_id() == 0 and rank < x.reducers:
                tk.expect_bytes(s.sent, x.exchange_bytes)
            for reducer in cutlass.range_constexpr(x.reducers):
                if rank != reducer:
                    self.send(s, acc, reducer, (rank - reducer + x.split - 1) % x.split)
            for reducer in cutlass.range_constexpr(x.reducers):
                if rank == reducer:
                    tk.wait(s.sent, 0)
                    self.receive(s, acc, reducer)
                    m = reducer * self.cols
                    self.store(g, [tk.columns(y, m, self.cols) for y in acc], vectors, n, m)

    def row_vectors(self, g, n):
        """Early, long before it is used: the bias, a value a row of each accumulator."""
        if not self.epilogue.bias:
            return [None] * self.config.parts
        found = [tk.rv() for _ in range(self.config.parts)]
        for part, v in enumerate(found):
            bias = g.inputs.bias if self.config.parts == 1 else g.inputs.bias[None, part]
            tk.load_rows(v, bias, n, cute.size(bias))
        return found

    @cute.jit
    def multiply(self, s: Constexpr, acc: Constexpr, steps, wg):
        full, done = s.pipe.ring(), s.pipe.ring()
        for i in cutlass.range(steps, unroll=1):
            s.pipe.wait(full)
            for part in cutlass.range_constexpr(self.config.parts):
                self.mma(acc[part], s.b[full.stage], s.a[full.stage], a_part=part * self.config.consumers + wg)
            full.advance()
            if i > 0:
                tk.mma_wait(self.config.parts)
                s.pipe.release(done)
                done.advance()
        tk.mma_wait(0)

    # ---- adding up: 4 numbers of each thread and 8 columns, to the same thread of another block

    def places(self, acc, reducer):
        """(accumulator, its first of 4 numbers, the same in what is exchanged) for each 8 columns of a reducer."""
        threads, groups = 128 * self.config.consumers, self.cols // GROUP
        return [(x, reducer * self.cols // 2 + 4 * i, 4 * threads * (part * groups + i))
                for part, x in enumerate(acc) for i in range(groups)]

    @cute.jit
    def send(self, s: Constexpr, acc: Constexpr, reducer: Constexpr[int], slot):
        for i in cutlass.range_constexpr(len(self.places(acc, reducer))):
            x, element, place = self.places(acc, reducer)[i]
            offset = slot * (self.config.rows * self.cols) + place + 4 * cute.arch.thread_idx()[0]
            to = s.exchange.iterator + offset
            values = [x.tensor[element + e] for e in range(4)]
            tk.store_remote(cute.make_ptr(Float32, to.toint(), to.memspace, assumed_align=16), values, s.sent, reducer)

    @cute.jit
    def receive(self, s: Constexpr, acc: Constexpr, reducer: Constexpr[int]):
        for slot in cutlass.range_constexpr(self.config.split - 1):
            for i in cutlass.range_constexpr(len(self.places(acc, reducer))):
                x, element, place = self.places(acc, reducer)[i]
                for e in cutlass.range_constexpr(4):
                    got = s.exchange[place + 4 * cute.arch.thread_idx()[0] + e, slot]
                    x.tensor[element + e] = x.tensor[element + e] + got

    def store(self, g, acc, bias, n, m):
        """The epilogue of some columns of the accumulators, which are rows of the result from m on."""
        e, parts, c = self.epilogue, [tk.rt_fl(x.cols) for x in acc], None
        if e.residual:
            c = tk.rt_fl(acc[0].cols)
            ep.load_residual(c, g.inputs.residual, ep.Place(n, Int32(m)), False)
        for x, sums, v in zip(parts, acc, bias):
            ep.linear(x, sums, e, g.inputs, v, c)
        ep.activate(parts[0], e, parts, ep.Place(Int32(m), n), tk.element_type(self.spec.out), transposed=True)
        tk.store_elements(g.out, parts[0], n, m)
