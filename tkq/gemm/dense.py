"""C = A @ B in bf16 or fp16, accumulated in fp32: persistent, its roles apart, TMA in and out."""
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from .. import tile as tk
from .plan import PANEL_BYTES, Config, raster
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
    c: tk.SharedTile  # ``buffers`` panels for each consumer
    pipe: tk.Pipe


@dataclass(frozen=True)
class State:
    """A consumer's registers."""

    acc: list  # a register tile for each 64 rows
    result: list  # what is to be written, in panels of C: rounded copies, or views of acc
    full: tk.Ring  # the stage to multiply next
    done: tk.Ring  # the stage to release next


class DenseGemm:
    """One warp loads, ``consumers`` warpgroups multiply. Block b of a grid of n takes tiles b, b + n, ..

    Roles:
      warpgroup 0, warp 0   for each tile, for each step of K: acquire a stage, load A's and B's tile into it
      warpgroups 1 ..       m / consumers rows each. For each tile:
                                wait for a stage, wgmma, release the stage before: for each step of K
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

    The blocks of a cluster work on neighbouring tiles; each loads its part of the operand that they share, for all.
    """

    def __init__(self, spec: GemmSpec, config: Config):
        self.spec, self.config = spec, config.check(spec)
        x, dtype = config, tk.element_type(spec.dtype)
        a_t, b_t = spec.transposed
        self.a_tile = tk.st(x.k, x.m, dtype) if a_t else tk.st(x.m, x.k, dtype)
        self.b_tile = tk.st(x.n, x.k, dtype) if b_t else tk.st(x.k, x.n, dtype)
        self.out = tk.element_type(spec.out)
        self.panel = PANEL_BYTES // BYTES[spec.out]  # columns
        self.c_tile = tk.st(64, self.panel, self.out)
        self.mm, self.mma = products(spec)

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, processors: Int32, stream: cuda.CUstream):
        x = self.config
        height, width = x.cluster_tile
        a_t, b_t = self.spec.transposed
        g = Globals(
            a=tk.gl.load(transposed(a) if a_t else a, self.a_tile, x.cluster if x.share == "a" else 1),
            b=tk.gl.load(transposed(b) if b_t else b, self.b_tile, x.cluster if x.share == "b" else 1),
            c=tk.gl.store(c, self.c_tile) if self.spec.store == "tma" else c,
            rows=cute.ceil_div(c.shape[0], height), cols=cute.ceil_div(c.shape[1], width),
            steps=cute.ceil_div(a.shape[1], x.k))
        grid = tk.blocks_for("static", g.rows * g.cols, processors, x.cluster)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[tk.WARPGROUP * (1 + x.consumers), 1, 1],
                              cluster=[x.cluster, 1, 1], stream=stream, min_blocks_per_mp=1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        x = self.config
        if tk.warp_id() == 0:
            tk.prefetch(g.a, g.b)
        al = tk.SharedAllocator()
        s = Shared(
            a=al.tile(self.a_tile, x.stages), b=al.tile(self.b_tile, x.stages),
            c=al.tile(self.c_tile, x.buffers * x.consumers) if self.spec.store == "tma" else None,
            pipe=al.pipe(x.stages, self.a_tile.bytes + self.b_tile.bytes, 4 * x.consumers, x.cluster))
        tk.init_block(s.pipe.init, x.cluster)
        tk.specialise(lambda: self.produce(g, s), lambda wg: self.consume(g, s, wg), x.consumers)
        if const_expr(x.cluster > 1):
            tk.cluster_sync()  # nobody leaves while another may still write to it

    def order(self, g):
        return tk.Schedule(g.rows * g.cols, "static", self.config.cluster)

    def tile(self, g, number):
        """(row, column) of this block's tile."""
        x = self.config
        row, col = raster(number, g.rows, g.cols, x.group, x.down, cutlass.min)
        if x.cluster == 1:
            return row, col
        rank = tk.cluster_rank()
        return (row * x.cluster + rank, col) if x.share == "b" else (row, col * x.cluster + rank)

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
        if const_expr(x.lead > 0):  # apart, so that one's end of a tile runs under the other's wgmma
            if wg == 1 and g.steps > x.lead:
                tk.wait(s.pipe.full[x.lead], 0)
        number = order.first()
        while number < order.tasks:
            self.multiply(s, u, self.mm, wg)
            if const_expr(x.hold):
                if number >= order.workers():  # not this block's first
                    self.write(g, s, u, number - order.workers(), wg)
            self.multiply_rest(g, s, u, wg)
            self.round(u)
            if const_expr(not x.hold):
                self.write(g, s, u, number, wg)
            number = order.following(number)
        if const_expr(x.hold):
            self.write(g, s, u, number - order.workers(), wg)
        tk.store_wait()

    def state(self, s) -> State:
        x = self.config
        acc = [tk.rt_fl(x.n) for _ in range(x.waves)]
        panels = [tk.columns(wave, p * self.panel, self.panel) for wave in acc for p in range(x.n // self.panel)]
        result = panels if self.spec.out == "fp32" else [tk.rt(self.panel, self.out) for _ in panels]
        return State(acc, result, s.pipe.ring(), s.pipe.ring())

    def multiply(self, s, u, product, wg):
        """Issue one step of K, for each 64 rows."""
        s.pipe.wait(u.full)
        for w, acc in enumerate(u.acc):
            product(acc, s.a[u.full.stage], s.b[u.full.stage], a_part=wg * self.config.waves + w)
        u.full.advance()

    @cute.jit
    def multiply_rest(self, g, s: Constexpr, u: Constexpr, wg):
        x = self.config
        if const_expr(x.lag == 0):
            tk.mma_wait(0)
            self.release(s, u)
        for _ in cutlass.range(1, g.steps, unroll=1):
            self.multiply(s, u, self.mma, wg)
            tk.mma_wait(x.waves * x.lag)
            self.release(s, u)
        if const_expr(x.lag == 1):
            tk.mma_wait(0)
            self.release(s, u)

    def release(self, s, u):
        s.pipe.release(u.done)
        u.done.advance()

    def round(self, u):
        if self.spec.out == "fp32":
            return
        for i, part in enumerate(u.result):
            w, p = divmod(i, self.config.n // self.panel)
            tk.copy(part, tk.columns(u.acc[w], p * self.panel, self.panel))

    @cute.jit
    def write(self, g, s: Constexpr, u: Constexpr, number, wg):
        """Tile ``number`` of C, panel by panel."""
        x = self.config
        row, col = self.tile(g, number)
        row, across = (row * x.consumers + wg) * x.waves, x.n // self.panel
        for i in cutlass.range_constexpr(len(u.result)):
            at = (row + i // across, col * across + i % across)
            if const_expr(self.spec.store == "tma"):
                self.send(g, s.c[wg * x.buffers + i % x.buffers], u.result[i], at, wg)
            else:
                tk.store_elements(g.c, u.result[i], at[0] * 64, at[1] * self.panel)

    @cute.jit
    def send(self, g, buffer: Constexpr, part: Constexpr, at, wg):
        tk.store_wait(self.config.buffers - 1)
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
    """Fake a (M, K), b (K, N) and c (M, N): any sizes, K a multiple of 8, and what the spec's paths ask of strides."""
    from ..runtime import fake

    M, N, K = fake.sym(), fake.sym(), fake.sym(divisibility=8)

    def matrix(dtype, shape, rows_contiguous, path):
        unit = 16 // BYTES[dtype] if path == "tma" else 1
        pitch = fake.sym64(divisibility=unit)
        return fake.tensor(dtype, shape, (pitch, 1) if rows_contiguous else (1, pitch), align=unit * BYTES[dtype])

    a_t, b_t = spec.transposed
    return (matrix(spec.dtype, (M, K), not a_t, spec.load), matrix(spec.dtype, (K, N), not b_t, spec.load),
            matrix(spec.out, (M, N), True, spec.store))


def build(spec: GemmSpec, config: Config):
    """(kernel, fake arguments): a, b, c, and how many processors the device has."""
    return DenseGemm(spec, config), (*operands(spec), Int32(1))
