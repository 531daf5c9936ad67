"""C = A @ B in bf16 or fp16, accumulated in fp32: persistent, its roles apart, TMA in and out."""
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from .. import tile as tk
from .plan import BUFFERS, PANEL_BYTES, STEP, Config, raster
from .spec import BYTES, GemmSpec

OUTPUT_BARRIER = 8  # and one more for each further consumer


@dataclass(frozen=True)
class Globals:
    a: tk.gl
    b: tk.gl
    c: Any  # tk.gl, or the tensor itself where it is stored by elements
    rows: Int32  # of cluster tiles
    cols: Int32
    steps: Int32  # of K


@dataclass(frozen=True)
class Shared:
    a: tk.SharedTile  # a ring of stages
    b: tk.SharedTile
    c: tk.SharedTile  # BUFFERS panels for each consumer
    pipe: tk.Pipe


@dataclass(frozen=True)
class State:
    """A consumer's registers."""

    acc: tk.RegTile
    result: list  # what is to be written, in panels of C: rounded copies, or views of acc
    full: tk.Ring  # the stage to multiply next
    done: tk.Ring  # the stage to release next


class DenseGemm:
    """One warp loads, ``consumers`` warpgroups multiply. Block b of a grid of n takes tiles b, b + n, ..

    Roles:
      warpgroup 0, warp 0   for each tile, for each step of K: acquire a stage, load A's and B's tile into it
      warpgroups 1 ..       64 rows each. For each tile:
                                for each step of K: wait for its stage, wgmma, release the stage before
                                round the accumulator to 16 bits, in registers
                                issue the next tile's first wgmma; under it, store the rounded tile panel by panel

      time      ->
      producer    |k0 k1 .. kn|k0 k1 ..         as stages come free: it does not know where a tile ends
      consumer 1  |k0 .. kn|round|k0 + store|k1 .. kn|round|k0 + store|
      consumer 2    the same, on the same stages of B

    Pipeline, ``stages`` deep:
      full[i]    1 arrival, the producer's, and the bytes of both tiles
      empty[i]   one arrival a consumer warp: 4 x consumers, from each block of the cluster
    Each consumer's panels of C: its own named barrier twice a panel (written by all, sent by one warp), TMA's own
    count of stores under way for using a buffer again.

    The blocks of a cluster work on tiles one above the other; each loads its own A, and its part of B for all.
    """

    def __init__(self, spec: GemmSpec, config: Config):
        self.spec, self.config = spec, config.check(spec)
        x, dtype = config, tk.element_type(spec.dtype)
        a_t, b_t = spec.transposed
        self.a_tile = tk.st(STEP, x.m, dtype) if a_t else tk.st(x.m, STEP, dtype)
        self.b_tile = tk.st(x.n, STEP, dtype) if b_t else tk.st(STEP, x.n, dtype)
        self.out = tk.element_type(spec.out)
        self.panel = PANEL_BYTES // BYTES[spec.out]  # columns
        self.c_tile = tk.st(64, self.panel, self.out)
        self.mm, self.mma = products(spec)

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, blocks: Int32, stream: cuda.CUstream):
        x = self.config
        a_t, b_t = self.spec.transposed
        g = Globals(
            a=tk.gl.load(transposed(a) if a_t else a, self.a_tile),
            b=tk.gl.load(transposed(b) if b_t else b, self.b_tile, x.cluster),
            c=self.destination(c),
            rows=cute.ceil_div(c.shape[0], x.m * x.cluster), cols=cute.ceil_div(c.shape[1], x.n),
            steps=cute.ceil_div(a.shape[1], STEP))
        grid = tk.blocks_for("static", g.rows * g.cols, cutlass.max(blocks, x.cluster), x.cluster)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[tk.WARPGROUP * (1 + x.consumers), 1, 1],
                              cluster=[x.cluster, 1, 1], stream=stream, min_blocks_per_mp=1)

    def destination(self, c):
        if self.spec.store != "tma":
            return c
        return tk.gl.add(c, self.c_tile) if self.spec.accumulate else tk.gl.store(c, self.c_tile)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        x = self.config
        if tk.warp_id() == 0:
            tk.prefetch(g.a, g.b)
        al = tk.SharedAllocator()
        s = Shared(
            a=al.tile(self.a_tile, x.stages), b=al.tile(self.b_tile, x.stages),
            c=al.tile(self.c_tile, BUFFERS * x.consumers) if self.spec.store == "tma" else None,
            pipe=al.pipe(x.stages, self.a_tile.bytes + self.b_tile.bytes, 4 * x.consumers, x.cluster))
        tk.init_block(s.pipe.init, x.cluster)
        tk.specialise(lambda: self.produce(g, s), lambda wg: self.consume(g, s, wg), x.consumers)
        if const_expr(x.cluster > 1):
            tk.cluster_sync()  # nobody leaves while another may still write to it

    def order(self, g):
        return tk.Schedule(g.rows * g.cols, "static", self.config.cluster)

    def tile(self, g, number):
        """(row, column) of this block's tile."""
        row, col = raster(number, g.rows, g.cols, self.config.group, cutlass.min)
        return row * self.config.cluster + tk.cluster_rank(), col

    @cute.jit
    def produce(self, g, s: Constexpr):
        order, r = self.order(g), s.pipe.ring()
        a_t, b_t = self.spec.transposed
        number = order.first()
        while number < order.tasks:
            row, col = self.tile(g, number)
            for k in cutlass.range(g.steps, unroll=1):
                sem = s.pipe.acquire(r)
                tk.load_async(s.a[r.stage], g.a, (k, row) if const_expr(a_t) else (row, k), sem)
                tk.load_async(s.b[r.stage], g.b, (col, k) if const_expr(b_t) else (k, col), sem)
                r.advance()
            number = order.following(number)

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        x, order, u = self.config, self.order(g), self.state(s)
        number = order.first()
        while number < order.tasks:
            self.multiply(s, u, self.mm, wg)
            if const_expr(x.hold):
                if number >= order.workers():  # not this block's first
                    self.write(g, s, u, number - order.workers(), wg)
            for _ in cutlass.range(1, g.steps, unroll=1):
                self.multiply(s, u, self.mma, wg)
                tk.mma_wait(1)
                self.release(s, u)
            tk.mma_wait(0)
            self.release(s, u)
            self.round(u)
            if const_expr(not x.hold):
                self.write(g, s, u, number, wg)
            number = order.following(number)
        if const_expr(x.hold):
            self.write(g, s, u, number - order.workers(), wg)
        tk.store_wait()

    def state(self, s) -> State:
        acc = tk.rt_fl(self.config.n)
        result = self.panels(acc)
        if self.spec.out != "fp32":
            result = [tk.rt(self.panel, self.out) for _ in result]
        return State(acc, result, s.pipe.ring(), s.pipe.ring())

    def panels(self, acc):
        """Views."""
        return [tk.columns(acc, col, self.panel) for col in range(0, self.config.n, self.panel)]

    def multiply(self, s, u, product, wg):
        """Issue one step of K."""
        s.pipe.wait(u.full)
        product(u.acc, s.a[u.full.stage], s.b[u.full.stage], a_part=wg)
        u.full.advance()

    def release(self, s, u):
        s.pipe.release(u.done)
        u.done.advance()

    def round(self, u):
        if self.spec.out != "fp32":
            for part, exact in zip(u.result, self.panels(u.acc)):
                tk.copy(part, exact)

    @cute.jit
    def write(self, g, s: Constexpr, u: Constexpr, number, wg):
        """Tile ``number`` of C, panel by panel."""
        row, col = self.tile(g, number)
        row = row * self.config.consumers + wg
        for i in cutlass.range_constexpr(len(u.result)):
            at = (row, col * len(u.result) + i)
            if const_expr(self.spec.store == "tma"):
                self.send(g, s.c[wg * BUFFERS + i % BUFFERS], u.result[i], at, wg)
            else:
                tk.store_elements(g.c, u.result[i], at[0] * 64, at[1] * self.panel, self.spec.accumulate)

    @cute.jit
    def send(self, g, buffer: Constexpr, part: Constexpr, at, wg):
        tk.store_wait(BUFFERS - 1)
        tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
        tk.store(buffer, part)
        tk.publish()
        tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(g.c, buffer, at)


def products(spec: GemmSpec):
    """The tile layer's product for these operands: from zero, and accumulating."""
    name = {(False, False): "AB", (False, True): "ABt", (True, False): "AtB", (True, True): "AtBt"}[spec.transposed]
    return getattr(tk, f"mm_{name}"), getattr(tk, f"mma_{name}")


def transposed(x: cute.Tensor) -> cute.Tensor:
    """A view."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0]))


def operands(spec: GemmSpec):
    """Fake a (M, K), b (K, N) and c (M, N): any sizes, and what the spec's paths ask of strides."""
    from ..runtime import fake

    M, N, K = fake.sym(), fake.sym(), fake.sym()

    def matrix(dtype, shape, rows_contiguous, path):
        unit = 16 // BYTES[dtype] if path == "tma" else 1
        pitch = fake.sym64(divisibility=unit)
        return fake.tensor(dtype, shape, (pitch, 1) if rows_contiguous else (1, pitch), align=unit * BYTES[dtype])

    a_t, b_t = spec.transposed
    return (matrix(spec.dtype, (M, K), not a_t, spec.load), matrix(spec.dtype, (K, N), not b_t, spec.load),
            matrix(spec.out, (M, N), True, spec.store))


def build(spec: GemmSpec, config: Config):
    """(kernel, fake arguments): a, b, c, and how many blocks to launch."""
    return DenseGemm(spec, config), (*operands(spec), Int32(1))
