"""C = A @ B in float8 with scales: persistent, its roles apart, TMA in and out."""
import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

from ... import tile as tk
from ..epilogue import registers as ep
from ..raster import raster
from .config import STEP, Fp8Config
from .epilogue import Fp8Out, fma_scaled
from .spec import BYTES, GROUP, Fp8Spec
from .state import Globals, Shared, State, Tile, at, transposed, vector


class Fp8Gemm(Fp8Out):
    """One warp loads, ``consumers`` warpgroups multiply. Block b of a grid of n takes tiles b, b + n, ..

    Roles:
      warpgroup 0, warp 0   for each tile, for each step of 128 of K: acquire a stage, load A's and B's tile into it,
                            and the step's scales where there are such
      warpgroups 1 ..       m_subtiles x 64 rows each. For each tile:
          sums of all of K  for each step: wait for its stage, wgmma, release the stage before
          promoted          for each step, subtile and part: wgmma from zero; its scales meet in registers under it;
                            add what came out, scaled, to the sums in fp32
                            scale, bias, activation; subtile by subtile to shared memory and out

      time      ->
      producer    |k0 k1 .. kn|k0 k1 ..         as stages come free: it does not know where a tile ends
      consumer 1 |k0 .. kn|store|k0 .. ``stagger_stages`` stages ahead of the second, so that consumer 2 |k0 ..
      kn|store|k0 .. one's epilogue overlaps the other's mainloop

    Pipeline, ``stages`` deep:
      full[i]    1 arrival, the producer's, and the bytes of both tiles; with scales of a step 32 more, each when a
                 lane's 4-byte copies have landed: scales of any order of memory and any M
      empty[i]   one arrival a consumer warp: 4 x consumers, from each block of the cluster
    Each consumer's panels of C: its own named barrier twice a panel (written by all, sent by one warp), none where each
    warp stores its own 16 rows; TMA's own count of stores under way for using a buffer again.
    """

    addressing = 40, 232  # registers of producer and consumer where addresses of scales take some
    # A tile's is fetched before its products: each panel of 32 columns waited for its own, 330 clocks. (With an
    # overlapped epilogue, under the first products.)
    bias_ahead = True

    def __init__(self, spec: Fp8Spec, config: Fp8Config):
        self.spec, self.config = spec, config.check(spec)
        x = config
        self.a_dtype, self.b_dtype, self.out = (tk.element_type(t) for t in (spec.a, spec.b, spec.out))
        self.a_tile, self.b_tile = tk.st(x.m, STEP, self.a_dtype), tk.st(x.n, STEP, self.b_dtype)
        self.mm, self.mma = tk.mm_ABt, tk.mma_ABt
        self.store_n = x.store_n(spec.out) if spec.store == "tma" else math.gcd(64, x.part)
        self.stores = 4 if x.store_per_warp else 1  # of a panel
        self.c_tile = tk.st(64 // self.stores, self.store_n, self.out) if spec.store == "tma" else None
        # 64 registers of column scales, before they are needed; promoted sums leave no room for them
        self.prefetch_scales = spec.scale_b == "row" and not spec.promote

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale_a: tuple, scale_b: tuple, bias: Int64,
                 out_scale: Int64, blocks: Int32, stream: cuda.CUstream):
        self.launch(self.globals(a, b, c, scale_a, scale_b, bias, out_scale), blocks, stream)

    def globals(self, a, b, c, scale_a, scale_b, bias, out_scale) -> Globals:
        x, spec = self.config, self.spec
        m, n, steps = c.shape[0], c.shape[1], cute.ceil_div(a.shape[1], STEP)
        down, right = (1, x.cluster) if const_expr(x.cluster_along_n) else (x.cluster, 1)
        return Globals(
            a=tk.gl.load(a, self.a_tile, right), b=tk.gl.load(transposed(b), self.b_tile, down),
            c=tk.gl.store(c, self.c_tile) if const_expr(spec.store == "tma") else c,
            scale_a=self.scales(scale_a, m, steps),
            scale_b=self.scales(scale_b, cute.ceil_div(n, GROUP) if const_expr(spec.scale_b == "128x128") else n,
                                steps),
            bias=vector(spec.bias, bias, n) if const_expr(spec.bias is not None) else None,
            out_scale=vector("fp32", out_scale, 1) if const_expr(spec.out == "e4m3") else None,
            m=m, n=n, rows=cute.ceil_div(m, x.m * down), cols=cute.ceil_div(n, x.n * right), steps=steps)

    def launch(self, g, blocks, stream):
        x = self.config
        grid = tk.blocks_for("static", g.rows * g.cols, cutlass.max(blocks, x.cluster), x.cluster)
        self.kernel(g).launch(grid=[grid, 1, 1], block=[tk.WARPGROUP * (1 + x.consumers), 1, 1],
                              cluster=[x.cluster, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=x.pdl)

    def scales(self, given, extent, steps):
        """A tensor at ``given``: (address, stride of rows or columns, stride of steps)."""
        address, stride, step = given
        shape = {"tensor": (1,), "row": (extent,)}.get(self.spec.scale_b, (extent, steps))
        return at(Float32, address, cute.make_layout(shape, stride=(stride, step)[:len(shape)]))

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        self.roles(g)

    @cute.jit
    def roles(self, g):
        x, spec = self.config, self.spec
        if tk.warp_id() == 0:
            tk.prefetch(g.a, g.b)
        s = self.shared(g, tk.SharedAllocator())
        tk.init_block(s.pipe.init, x.cluster)
        if const_expr(x.pdl):  # up to here nothing was read or written that another kernel has to do with
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tk.specialise(lambda: self.produce(g, s), lambda wg: self.consume(g, s, wg), x.consumers,
                      self.addressing if spec.per_step and x.consumers == 2 else ())
        if const_expr(x.cluster > 1):
            tk.cluster_sync()  # no block exits while another may still write to its shared memory

    def shared(self, g, al) -> Shared:
        x, spec = self.config, self.spec
        a, b = self.stage_tiles()
        return Shared(
            a=al.tile(a, self.a_tile.bytes // a.bytes * x.stages),
            b=al.tile(b, self.b_tile.bytes // b.bytes * x.stages),
            c=al.tile(self.c_tile, self.stores * x.store_buffers * x.consumers) if spec.store == "tma" else None,
            scales=al.vector(x.scales(spec), x.stages) if spec.per_step else None,
            pipe=al.pipe(x.stages, self.a_tile.bytes + self.b_tile.bytes, 4 * x.consumers, x.cluster,
                         copies=32 if spec.per_step else 0))

    def stage_tiles(self):
        """What a stage's a and b consist of: 64 rows, and the columns that are multiplied together."""
        return tk.st(64, STEP, self.a_dtype), tk.st(self.config.part, STEP, self.b_dtype)

    def order(self, g, s):
        return tk.Schedule(g.rows * g.cols, "static", self.config.cluster)

    def tile(self, g, s, order, number) -> Tile:
        return Tile(*self.in_cluster(*raster(number, g.rows, g.cols, self.config.raster_group, cutlass.min)))

    def in_cluster(self, row, col):
        """This block's (row, column), from its cluster's."""
        x = self.config
        if x.cluster_along_n:
            return row, col * x.cluster + tk.cluster_rank()
        return row * x.cluster + tk.cluster_rank(), col

    def steps(self, g, t):
        return g.steps

    @cute.jit
    def produce(self, g, s: Constexpr):
        order, r = self.order(g, s), s.pipe.ring()
        number = order.first()
        while number < order.tasks:
            t = self.tile(g, s, order, number)
            for k in cutlass.range(self.steps(g, t), unroll=1):
                self.load_stage(g, s, t, k, r)
                r.advance()
            number = order.following(number)

    def load_stage(self, g, s, t, k, r):
        sem = s.pipe.acquire(r)
        self.load_tiles(g, s, r.stage, t, k, sem)
        if self.spec.per_step:
            self.load_scales(g, s.scales[None, r.stage], t, k)
            tk.copy_async_arrive(sem)

    def load_tiles(self, g, s, stage, t, k, sem):
        x = self.config
        tk.load_async(s.a.stacked(x.m // 64)[stage], g.a, (t.row, k), sem)
        tk.load_async(s.b.stacked(x.split)[stage], g.b, (t.col, k), sem)

    def first_row(self, t):
        """Of a tile, among the rows of scales."""
        return t.row * self.config.m

    def column_scales(self, g, t):
        """Those of b's columns, or of its columns and steps."""
        return g.scale_b

    def load_scales(self, g, to, t, k):
        """A step's scales, by the lanes of a warp. Past the end: the last ones, for sums that are not stored."""
        x, lane = self.config, tk.lane_id()
        row0, col0, of_columns = self.first_row(t), t.col * x.n, self.column_scales(g, t)
        for j in range(x.m // 32):
            tk.copy_async(to, 32 * j + lane, g.scale_a, (cutlass.min(row0 + 32 * j + lane, g.m - 1), k))
        if self.spec.scale_b == "128x128":  # one for each chunk of columns: whatever of n, it lies in one block
            col = cutlass.min(col0 + lane % (x.n // x.chunk) * x.chunk, g.n - 1)
            tk.copy_async(to, x.m + lane, of_columns, (col // GROUP, k))
            return
        for j in range(-(-x.n // 32)):
            col = lane + 32 * j if x.n % 32 == 0 else (lane + 32 * j) % x.n
            tk.copy_async(to, x.m + col, of_columns, (cutlass.min(col0 + col, g.n - 1), k))

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        order, u = self.order(g, s), self.state(s)
        number = order.first()
        self.stagger(g, s, order, number, wg)
        while number < order.tasks:
            t = self.tile(g, s, order, number)
            if const_expr(self.bias_ahead):
                self.load_bias(g, u, t)
            if const_expr(self.spec.promote):
                self.sum_promoted(g, s, u, t, wg)
            else:
                self.sum_all(g, s, u, t, wg)
            self.write(g, s, u, t, wg)
            number = order.following(number)
        tk.store_wait()

    @cute.jit
    def stagger(self, g, s: Constexpr, order, number, wg):
        """The second consumer waits at the first tile, until the first one can have ``stagger_stages`` stages."""
        stagger_stages = self.config.stagger_stages
        if const_expr(stagger_stages > 0):
            if wg == 1 and number < order.tasks:
                if self.steps(g, self.tile(g, s, order, number)) > stagger_stages:
                    tk.wait(s.pipe.full[stagger_stages], 0)

    def state(self, s) -> State:
        x, spec = self.config, self.spec
        return State([tk.rt_fl(x.part) for _ in range(x.m_subtiles * x.split)], s.pipe.ring(), s.pipe.ring(),
                     [tk.rv() for _ in range(x.m_subtiles)], tk.cv(x.n) if self.prefetch_scales else None,
                     ep.spread(-(-x.n // 64) * 64, tk.element_type(spec.bias)) if spec.bias else None)

    # ---- sums of all of K, scaled at the end ------------------------------------------------------

    def sum_all(self, g, s, u, t, wg):
        self.sum_products(g, s, u, t, wg)

    @cute.jit
    def sum_products(self, g, s: Constexpr, u: Constexpr, t, wg):
        x = self.config
        self.multiply(s, u, self.mm, wg)
        if const_expr(self.prefetch_scales):  # under the first product
            self.load_row_scales(g, u, t, wg)
            tk.load_cols(u.cols, self.column_scales(g, t), t.col * x.n, g.n)
        if const_expr(x.wgmma_in_flight == 0):
            tk.mma_wait(0)
            self.release(s, u)
        for _ in cutlass.range(1, self.steps(g, t), unroll=1):
            self.multiply(s, u, self.mma, wg)
            tk.mma_wait(x.m_subtiles * x.wgmma_in_flight)
            self.release(s, u)
        if const_expr(x.wgmma_in_flight > 0):
            tk.mma_wait(0)
            self.release(s, u)

    def multiply(self, s, u, product, wg):
        """Issue one step of K."""
        x = self.config
        self.ready(s, u, wg)
        for w in range(x.m_subtiles):
            self.multiply_subtile(product, u.acc[w], s, u.full, w, wg)
        u.full.advance()

    def ready(self, s, u, wg):
        """Wait until a step's tiles are what is to be multiplied."""
        s.pipe.wait(u.full)

    def multiply_subtile(self, product, acc, s, r, w, wg):
        product(acc, self.rows_of(s, r, w, wg), s.b[r.stage])

    def rows_of(self, s, r, w, wg):
        """A's 64 rows of a wave."""
        return s.a[r.stage * (self.config.m // 64) + wg * self.config.m_subtiles + w]

    def release(self, s, u):
        s.pipe.release(u.done)
        u.done.advance()

    def load_row_scales(self, g, u, t, wg):
        x = self.config
        for w in range(x.m_subtiles):
            tk.load_rows(u.rows[w], g.scale_a, self.first_row(t) + 64 * (wg * x.m_subtiles + w), g.m)

    # ---- sums of a step, added up in fp32 ---------------------------------------------------------

    @cute.jit
    def sum_promoted(self, g, s: Constexpr, u: Constexpr, t, wg):
        x = self.config
        for acc in u.acc:
            tk.zero(acc)
        part, row = tk.rt_fl(x.part), tk.rv()
        n = x.m_subtiles * x.split
        for _ in cutlass.range(self.steps(g, t), unroll=1):
            self.ready(s, u, wg)
            for i in cutlass.range_constexpr(n):
                self.start(s, u, part, i, wg)
                scales = self.scales_of(s, u.full, row, i, wg)
                tk.mma_wait(0)
                if const_expr(i == n - 1 and self.spec.scale_b != "1x128"):
                    s.pipe.release(u.full)
                self.promote(u.acc[i], part, row, scales)
            if const_expr(self.spec.scale_b == "1x128"):  # its scales are read until the end
                s.pipe.release(u.full)
            u.full.advance()

    def start(self, s, u, part, i, wg):
        """Issue the product of wave i // split and part i % split of this step."""
        split = self.config.split
        tk.mm_ABt(part, self.rows_of(s, u.full, i // split, wg), s.b[u.full.stage * split + i % split])

    def scales_of(self, s, r, row, i, wg):
        """The rows' scales of a stage into ``row``; returns the columns': numbers, or where they lie."""
        x = self.config
        if not self.spec.per_step:
            return None
        here = s.scales[None, r.stage]
        if i % x.split == 0:
            for h in range(2):
                row.tensor[h] = here[64 * (wg * x.m_subtiles + i // x.split) + tk.first_row() + 8 * h]
        first = x.m + i % x.split * x.part
        if self.spec.scale_b == "1x128":
            return cute.make_tensor(here.iterator + first, cute.make_layout(x.part))
        first = x.m + i % x.split * (x.part // x.chunk)
        return [here[first + j] for j in range(x.part // x.chunk)]

    def promote(self, acc, part, row, scales):
        if self.spec.scale_b == "128x128":
            tk.fma_outer(acc, part, row, scales)
        elif self.spec.scale_b == "1x128":
            fma_scaled(acc, part, row, scales)
        else:
            tk.add(acc, acc, part)


def operands(spec: Fp8Spec):
    """Fake a (M, K), b (K, N) and c (M, N): any sizes, K-contiguous, and what TMA asks of strides."""
    from ...runtime.compile import fake

    M, N, K = fake.sym(), fake.sym(), fake.sym(divisibility=16)
    unit = 16 // BYTES[spec.out] if spec.store == "tma" else 1
    return (fake.tensor(spec.a, (M, K), (fake.sym64(divisibility=16), 1)),
            fake.tensor(spec.b, (K, N), (1, fake.sym64(divisibility=16))),
            fake.tensor(spec.out, (M, N), (fake.sym64(divisibility=unit), 1), align=unit * BYTES[spec.out]))


def form(config: Fp8Config) -> type:
    """The kernel that takes such a configuration."""
    from .overlapped_epilogue import OverlappedEpilogueFp8Gemm, OverlappedPipelinedFp8Gemm
    from .pipelined_promotion import PipelinedPromotionFp8Gemm

    forms = (Fp8Gemm, PipelinedPromotionFp8Gemm), (OverlappedEpilogueFp8Gemm, OverlappedPipelinedFp8Gemm)
    return forms[config.overlap_epilogue > 0][config.promotion_unroll > 0]


def build(spec: Fp8Spec, config: Fp8Config):
    """(kernel, fake arguments): a, b, c; (address, stride, stride) of each operand's scales; the addresses of bias and
    out_scale, 0 where there is none; how many blocks to launch."""
    scales = (Int64(1), Int64(1), Int64(1))
    return form(config)(spec, config), (*operands(spec), scales, scales, Int64(1), Int64(1), Int32(1))
