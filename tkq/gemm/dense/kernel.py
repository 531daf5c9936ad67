"""out = f(A @ B) in bf16 or fp16, accumulated in fp32: persistent, its roles apart, TMA in and out."""
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

from ... import tile as tk
from ..epilogue import registers as ep
from ..raster import raster
from . import operands
from .config import BUFFERS, STEP, STORE_ROW_BYTES, Config, has_store_buffers
from .put_rows import put_rows
from .spec import BYTES, GemmSpec

OUTPUT_BARRIER = 8  # and one more for each further consumer


@dataclass(frozen=True)
class Globals:
    a: tk.gl
    b: tk.gl
    out: Any  # tk.gl, or the tensor itself where it is stored by elements
    inputs: ep.Inputs
    rows: Int32  # of cluster tiles
    cols: Int32
    batches: Int32
    steps: Int32  # of K


@dataclass(frozen=True)
class Shared:
    a: tk.SharedTile  # a ring of stages
    b: tk.SharedTile
    b_parts: tk.SharedTile  # the same memory: gate and up of each stage, where b has them apart; otherwise b
    out: tk.SharedTile  # BUFFERS panels for each consumer
    pipe: tk.Pipe


@dataclass(frozen=True)
class State:
    """A consumer's registers."""

    acc: tk.RegTile
    pending: list  # a finished tile in 16 bits, in panels; before that, c. Empty where nothing is held
    bias: Any  # of the tile's columns: a list, of one or of gate's and up's
    full: tk.Ring  # the stage to multiply next
    done: tk.Ring  # the stage to release next


@dataclass(frozen=True)
class Tile:
    """Where a tile of the result lies, in tiles of a block."""

    batch: Int32
    row: Int32
    col: Int32


class DenseGemm:
    """One warp loads, ``consumers`` warpgroups multiply. Block b of a grid of n takes tiles b, b + n, ..

    Roles:
      warpgroup 0, warp 0   for each tile, for each step of K: acquire a stage, load A's and B's tile into it
      warpgroups 1 ..       64 rows each. For each tile:
                                for each step of K: wait for its stage, wgmma, release the stage before
                                finish the accumulator (epilogue) and round it to 16 bits, in registers
                                issue the next tile's first wgmma; under it, store the rounded tile, subtile by subtile

      time      ->
      producer    |k0 k1 .. kn|k0 k1 ..         as stages come free: it does not know where a tile ends
      consumer 1  |k0 .. kn|finish|k0 + store|k1 .. kn|finish|k0 + store|
      consumer 2    the same, on the same stages of B
      overlapped  |k0 .. kn|finish|k0 + store 0|k1 + store 1|k2 + store 2|k3 + store 3|k4 .. kn|finish|
      deferred    as overlapped, and the activation is not in finish but in its store's step, or in pieces under 2 or 4

    Pipeline, ``stages`` deep:
      full[i]    1 arrival, the producer's, and the bytes of both tiles
      empty[i]   one arrival a consumer warp: 4 x consumers, from each block of the cluster
    Each consumer's panels of the result: its own named barrier twice a panel (written by all, sent by one warp), TMA's
    own count of stores under way for using a buffer again.

    The blocks of a cluster work on tiles one above the other; each loads its own A, and its part of B for all.

    Gated, the left half of B's tile is columns of the gate and the right half the same columns of up: a thread has both
    in its accumulator, and half a tile is stored.
    """

    def __init__(self, spec: GemmSpec, config: Config):
        self.spec, self.config, self.epilogue = spec, config.check(spec), spec.epilogue
        x, dtype = config, tk.element_type(spec.dtype)
        a_t, b_t = spec.transposed
        self.parts = 2 if self.epilogue.gate else 1  # of B's tile, loaded by themselves
        width = x.n // self.parts
        self.a_tile = tk.st(STEP, x.m, dtype) if a_t else tk.st(x.m, STEP, dtype)
        self.b_tile = tk.st(x.n, STEP, dtype) if b_t else tk.st(STEP, x.n, dtype)
        self.b_part = tk.st(width, STEP, dtype) if b_t else tk.st(STEP, width, dtype)
        self.out = tk.element_type(spec.out)
        self.store_n = STORE_ROW_BYTES // BYTES[spec.out]  # columns
        self.n_stores = width // self.store_n  # of a tile of the result
        self.out_tile = tk.st(64, self.store_n, self.out)
        self.mm, self.mma = operands.products(spec)

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, bias, c, alpha: Float32, beta: Float32,
                 blocks: Int32, stream: cuda.CUstream):
        x, spec = self.config, self.spec
        out = operands.matrix(out)
        A = operands.matrix(a, spec.transposed[0])
        rows, cols = cute.ceil_div(out.shape[0], x.m * x.cluster), cute.ceil_div(out.shape[1], x.n // self.parts)
        batches = Int32(1) if const_expr(not spec.batch) else out.shape[2]
        K = A.shape[0] if const_expr(spec.transposed[0]) else A.shape[1]
        g = Globals(
            a=tk.gl.load(A, self.a_tile), b=tk.gl.load(operands.weights(b, spec), self.b_part, x.cluster),
            out=self.destination(out),
            inputs=ep.Inputs(operands.column_vector(bias, spec), operands.residual(c, spec), alpha, beta),
            rows=rows, cols=cols, batches=batches, steps=cute.ceil_div(K, STEP))
        grid = tk.blocks_for("static", rows * cols * batches, cutlass.max(blocks, x.cluster), x.cluster)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[tk.WARPGROUP * (1 + x.consumers), 1, 1],
                              cluster=[x.cluster, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=x.pdl)

    def destination(self, out):
        if self.spec.store != "tma":
            return out
        return tk.gl.add(out, self.out_tile) if self.spec.accumulate else tk.gl.store(out, self.out_tile)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        x = self.config
        if tk.warp_id() == 0:
            tk.prefetch(g.a, g.b)
        al = tk.SharedAllocator()
        a, b = al.tile(self.a_tile, x.stages), al.tile(self.b_tile, x.stages)
        s = Shared(
            a=a, b=b, b_parts=operands.parts_of_tile(b, self.b_part, self.parts),
            out=al.tile(self.out_tile, BUFFERS * x.consumers) if has_store_buffers(self.spec) else None,
            pipe=al.pipe(x.stages, self.a_tile.bytes + self.b_tile.bytes, 4 * x.consumers, x.cluster))
        tk.init_block(s.pipe.init, x.cluster)
        if const_expr(x.pdl):  # up to here nothing was read or written that another kernel has to do with
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tk.specialise(lambda: self.produce(g, s), lambda wg: self.consume(g, s, wg), x.consumers)
        if const_expr(x.cluster > 1):
            tk.cluster_sync()  # no block exits while another may still write to its shared memory

    def order(self, g):
        return tk.Schedule(g.rows * g.cols * g.batches, "static", self.config.cluster)

    def tile(self, g, number) -> Tile:
        """This block's tile."""
        batch = Int32(0)
        if self.spec.batch:
            batch = number // (g.rows * g.cols)
            number = number - batch * (g.rows * g.cols)
        row, col = raster(number, g.rows, g.cols, self.config.raster_group, cutlass.min)
        return Tile(batch, row * self.config.cluster + tk.cluster_rank(), col)

    @cute.jit
    def produce(self, g, s: Constexpr):
        order, r = self.order(g), s.pipe.ring()
        number = order.first()
        while number < order.tasks:
            t = self.tile(g, number)
            for k in cutlass.range(g.steps, unroll=1):
                self.load(g, s, t, k, r)
                r.advance()
            number = order.following(number)

    def load(self, g, s, t, k, r):
        """A stage."""
        sem = s.pipe.acquire(r)
        a_t, b_t = self.spec.transposed
        at = [t.batch] if "a" in self.spec.batch else []
        tk.load_async(s.a[r.stage], g.a, (*at, *((k, t.row) if a_t else (t.row, k))), sem)
        at = [t.batch] if "b" in self.spec.batch else []
        place = (t.col, k) if b_t else (k, t.col)
        if self.parts == 1:
            tk.load_async(s.b[r.stage], g.b, (*at, *place), sem)
        else:
            for half in range(2):
                tk.load_async(s.b_parts[2 * r.stage + half], g.b, (*at, half, *place), sem)

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        x, order, u = self.config, self.order(g), self.state(g, s)
        number = order.first()
        while number < order.tasks:
            t, first = self.tile(g, number), Int32(1)
            self.multiply(s, u, self.mm, wg)
            if const_expr(x.overlap_epilogue):
                first = self.write_overlapped(g, s, u, number, wg)
            elif const_expr(x.hold_in_registers):
                if number >= order.workers():  # not this block's first
                    self.write(g, s, u, self.tile(g, number - order.workers()), wg)
            self.fetch(g, u, t, wg)
            for _ in cutlass.range(first, g.steps, unroll=1):
                self.step(s, u, wg)
            tk.mma_wait(0)
            self.release(s, u)
            if const_expr(x.hold_in_registers):
                self.finish(g, u, t, wg)
            else:
                self.write(g, s, u, t, wg)
            number = order.following(number)
        if const_expr(x.hold_in_registers):
            self.write(g, s, u, self.tile(g, number - order.workers()), wg)
        tk.store_wait()

    def state(self, g, s) -> State:
        x, pending, bias = self.config, [], None
        if x.hold_in_registers:
            pending = [tk.rt(self.store_n, self.out)
                       for _ in range(self.n_stores * (self.parts if x.defer_activation else 1))]
        if self.epilogue.bias:
            bias = [ep.spread(x.n // self.parts, tk.element_type(self.epilogue.bias)) for _ in range(self.parts)]
        return State(tk.rt_fl(x.n), pending, bias, s.pipe.ring(), s.pipe.ring())

    # ---- products

    def multiply(self, s, u, product, wg):
        """Issue one step of K."""
        s.pipe.wait(u.full)
        product(u.acc, s.a[u.full.stage], s.b[u.full.stage], a_part=wg)
        u.full.advance()

    def release(self, s, u):
        s.pipe.release(u.done)
        u.done.advance()

    def step(self, s, u, wg):
        """Issue one K step and retire the previous one."""
        self.multiply(s, u, self.mma, wg)
        tk.mma_wait(1)
        self.release(s, u)

    # ---- from the accumulator to the result

    def place(self, t, i, wg) -> ep.Place:
        """Of a panel of the result, for this consumer."""
        return ep.Place((t.row * self.config.consumers + wg) * 64, (t.col * self.n_stores + i) * self.store_n)

    def fetch(self, g, u, t, wg):
        """What the tile's epilogue will need, on its way while the products run."""
        if self.epilogue.bias:
            for part, v in enumerate(u.bias):
                bias = g.inputs.bias[None, part] if self.parts == 2 else g.inputs.bias
                ep.load_spread(v, bias, t.col * (self.n_stores * self.store_n))
        if self.epilogue.residual and self.config.hold_in_registers:
            for i, subtile in enumerate(u.pending):
                self.load_residual(g, subtile, t, i, wg)

    def load_residual(self, g, dst, t, i, wg):
        c = operands.of_batch(g.inputs.residual, t.batch)
        ep.load_residual(dst, c, self.place(t, i, wg), self.epilogue.residual_pairs)

    def product(self, g, u, t, i, wg):
        """Panel i of the result before its activation, in new fp32 tiles: one, or gate and up."""
        return [self.linear(g, u, t, i, part, wg) for part in range(self.parts)]

    def linear(self, g, u, t, i, part, wg):
        e, x, bias, c = self.epilogue, tk.rt_fl(self.store_n), None, None
        if e.bias:
            bias = tk.cv(self.store_n)
            ep.gather(bias, u.bias[part], i * self.store_n)
        if e.residual:
            c = u.pending[i] if self.config.hold_in_registers else tk.rt(self.store_n, self.out)
            if not self.config.hold_in_registers:
                self.load_residual(g, c, t, i, wg)
        acc = tk.columns(u.acc, (part * self.n_stores + i) * self.store_n, self.store_n)
        ep.linear(x, acc, e, g.inputs, bias, c)
        return x

    def finish(self, g, u, t, wg):
        """Round the accumulator into what is held: the result or, late, what its activation is of."""
        for i in range(self.n_stores):
            parts = self.product(g, u, t, i, wg)
            if self.config.defer_activation:
                for part, x in enumerate(parts):
                    tk.copy(u.pending[part * self.n_stores + i], x)
            else:
                ep.activate(parts[0], self.epilogue, parts, self.place(t, i, wg), self.out)
                tk.copy(u.pending[i], parts[0])

    def subtile_of_result(self, g, u, t, i, wg):
        """Panel i as it is stored, in registers."""
        if self.config.hold_in_registers and not self.config.defer_activation:
            return u.pending[i]
        if self.epilogue.plain and self.spec.out == "fp32":
            return tk.columns(u.acc, i * self.store_n, self.store_n)
        result = tk.rt(self.store_n, self.out)
        if self.config.defer_activation:
            ep.activate_narrow(result, self.epilogue,
                               [u.pending[part * self.n_stores + i] for part in range(self.parts)])
            return result
        parts = self.product(g, u, t, i, wg)
        ep.activate(parts[0], self.epilogue, parts, self.place(t, i, wg), self.out)
        tk.copy(result, parts[0])
        return result

    @cute.jit
    def write_overlapped(self, g, s: Constexpr, u: Constexpr, number, wg):
        """The tile before, a panel or a piece of one under each of this one's first steps of K, as far as it has as
        many. Returns the next step."""
        workers = self.order(g).workers()
        t = self.tile(g, number - workers)
        pieces = self.config.overlap_epilogue  # of a panel
        for i in cutlass.range_constexpr(self.n_stores):
            for piece in cutlass.range_constexpr(pieces):
                if number >= workers:
                    if const_expr(pieces > 1):
                        self.activate_piece(u, i, piece)
                        if const_expr(piece == pieces - 1):
                            self.put(g, s, u.pending[i], t, i, wg)
                    else:
                        self.write_subtile(g, s, u, t, i, wg)
                if pieces * i + piece + 1 < g.steps:
                    self.step(s, u, wg)
        return cutlass.min(pieces * self.n_stores + 1, g.steps)

    def activate_piece(self, u, i, piece):
        """One of ``overlap_epilogue`` pieces of panel i's activation, in the product's registers: others would
        spill."""
        width = self.store_n // self.config.overlap_epilogue

        def columns(x):
            return tk.columns(x, piece * width, width)

        parts = [columns(u.pending[part * self.n_stores + i]) for part in range(self.parts)]
        ep.activate_narrow(parts[0], self.epilogue, parts)

    @cute.jit
    def write(self, g, s: Constexpr, u: Constexpr, t, wg):
        """A tile of the result, panel by panel."""
        for i in cutlass.range_constexpr(self.n_stores):
            self.write_subtile(g, s, u, t, i, wg)

    def write_subtile(self, g, s, u, t, i, wg):
        self.put(g, s, self.subtile_of_result(g, u, t, i, wg), t, i, wg)

    def put(self, g, s, result, t, i, wg):
        """Panel i, from registers to where it belongs."""
        at = self.place(t, i, wg)
        if self.spec.store == "tma":
            place = (t.row * self.config.consumers + wg, t.col * self.n_stores + i)
            self.send(g, s.out[wg * BUFFERS + i % BUFFERS], result, (t.batch, *place) if self.spec.batch else place, wg)
        elif self.spec.store == "rows":
            self.send_rows(operands.of_batch(g.out, t.batch), s.out[wg * BUFFERS + i % BUFFERS], result, at, wg)
        else:
            tk.store_elements(operands.of_batch(g.out, t.batch), result, at.row, at.col, self.spec.accumulate)

    def send_rows(self, out, buffer, part, at, wg):
        """Rows that TMA does not write: through shared memory too, where neighbours of a row are neighbours."""
        if self.n_stores % BUFFERS:  # otherwise all have read this buffer when they meet over the other one
            tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
        tk.store(buffer, part)
        tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
        put_rows(out, buffer, at.row, at.col)

    @cute.jit
    def send(self, g, buffer: Constexpr, part: Constexpr, at, wg):
        # Of an odd number of panels, the last one and the next tile's first share a buffer: nothing may be on its way.
        tk.store_wait(0 if self.n_stores % BUFFERS else BUFFERS - 1)
        tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
        tk.store(buffer, part)
        tk.publish()
        tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)
        if tk.first_warp_of_group():
            tk.store_async(g.out, buffer, at)


def build(spec: GemmSpec, config: Config):
    """(kernel, fake arguments): a, b, out, bias, c, alpha, beta, and how many blocks to launch."""
    return DenseGemm(spec, config), (*operands.fakes(spec), Int32(1))
