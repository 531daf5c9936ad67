"""c = activation((a * scale_a) @ (b * scale_b) + bias) for small M: ``SmallMGemm`` in float8."""
from dataclasses import dataclass, replace
from typing import Any, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

from ... import tile as tk
from ..dense.small_m_kernel import SmallMGemm
from .config import STEP
from .epilogue import activate, fma_scaled, store_e4m3_elements
from .kernel import operands
from .small_m_config import SmallMFp8Config
from .spec import GROUP, Fp8Spec
from .state import scales_at, transposed, vector


@dataclass(frozen=True)
class Globals:
    a: tk.gl
    b: tk.gl  # N rows
    out: cute.Tensor  # (N, M)
    scale_a: cute.Tensor  # (1,), (M,) or (M, steps)
    scale_b: cute.Tensor  # (1,), (N,), (N / 128, steps) or (N, steps)
    bias: Optional[cute.Tensor]  # (N,)
    out_scale: Optional[cute.Tensor]  # (1,)
    steps: Int32  # of K
    tile: Optional[Int32] = None  # of A's rows, a cluster's; None: there is one


@dataclass(frozen=True)
class Shared:
    a: tk.SharedTile  # a ring of stages
    b: tk.SharedTile
    scales: Any  # (a's and b's of a step, stages)
    pipe: tk.Pipe
    exchange: Any  # (numbers, senders): what the other blocks of the cluster send; None where there are none
    sent: tk.Semaphore


class SmallMFp8Gemm(SmallMGemm):
    """A cluster makes ``rows`` columns of the result, of ``m`` rows of A; each of its ``split`` blocks takes part of K.
    The widest takes any number of A's rows, tile by tile.

    Roles, the exchange between blocks and what they wait for are ``SmallMGemm``'s. Where scales change along K the
    producer's lanes bring those of a step with its tiles (32 more arrivals at full[i], when they have landed), and the
    consumers add each step's product, scaled, to sums in fp32.
    """

    def __init__(self, spec: Fp8Spec, config: SmallMFp8Config):
        self.spec, self.config = spec, config.check(spec)
        self.out = tk.element_type(spec.out)
        self.a_tile = tk.st(config.m, STEP, tk.element_type(spec.a))
        self.b_tile = tk.st(config.rows, STEP, tk.element_type(spec.b))
        self.width, self.cols = config.rows, config.m // config.reducers  # of the result; of an accumulator, in the end

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale_a: tuple, scale_b: tuple, bias: Int64,
                 out_scale: Int64, blocks: Int32, stream: cuda.CUstream):
        x, spec = self.config, self.spec
        m, n, steps = c.shape[0], c.shape[1], cute.ceil_div(a.shape[1], STEP)
        g = Globals(
            a=tk.gl.load(a, self.a_tile), b=tk.gl.load(transposed(b), self.b_tile), out=transposed(c),
            scale_a=scales_at(spec, scale_a, m, steps),
            scale_b=scales_at(spec, scale_b, cute.ceil_div(n, GROUP) if const_expr(spec.scale_b == "128x128") else n,
                              steps),
            bias=vector(spec.bias, bias, n) if const_expr(spec.bias is not None) else None,
            out_scale=vector("fp32", out_scale, 1) if const_expr(spec.out == "e4m3") else None, steps=steps)
        tiles = cute.ceil_div(n, x.rows) * (cute.ceil_div(m, x.m) if const_expr(x.tiled) else 1)
        self.kernel(g).launch(grid=[tiles * x.split, 1, 1], block=[x.threads, 1, 1],
                              cluster=[x.split, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=x.pdl)

    def fake_arguments(self) -> tuple:
        """What it is compiled for: as ``Fp8Gemm``, but ``blocks`` is not used: the grid is what the sizes make it."""
        scales = (Int64(1), Int64(1), Int64(1))
        return *operands(self.spec), scales, scales, Int64(1), Int64(1), Int32(1)

    # ---- device --------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, g: Globals):
        x, spec = self.config, self.spec
        al = tk.SharedAllocator()
        s = Shared(
            a=al.tile(self.a_tile, x.stages), b=al.tile(self.b_tile, x.stages),
            scales=al.vector(x.scales(spec), x.stages) if spec.per_step else None,
            pipe=al.pipe(x.stages, self.a_tile.bytes + self.b_tile.bytes, 4 * x.consumers,
                         copies=32 if spec.per_step else 0),
            exchange=al.vector(x.rows * self.cols, x.split - 1) if x.split > 1 else None, sent=al.semaphores())
        tk.init_block(lambda: self.init(s), x.split)
        if const_expr(x.pdl):  # up to here nothing was read or written that another kernel has to do with
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        self.work(g, s)

    def place(self, g, cluster):
        """Clusters side by side take the same columns of B."""
        if not self.config.tiled:
            return g, cluster
        down = cute.ceil_div(cute.size(g.out, mode=[1]), self.config.m)
        return replace(g, tile=cluster % down), cluster // down

    def tile_of(self, g):
        return g.tile if self.config.tiled else 0

    @cute.jit
    def produce(self, g, s: Constexpr, row, first, end):
        r = s.pipe.ring()
        for k in cutlass.range(first, end, unroll=1):
            sem = s.pipe.acquire(r)
            tk.load_async(s.b[r.stage], g.b, (row, k), sem)
            tk.load_async(s.a[r.stage], g.a, (self.tile_of(g), k), sem)
            if const_expr(self.spec.per_step):
                self.load_scales(g, s.scales[None, r.stage], row, k)
                tk.copy_async_arrive(sem)
            r.advance()

    def load_scales(self, g, to, row, k):
        """A step's scales, by the lanes of a warp. Past the end: the last ones, for sums that are not stored."""
        x, lane = self.config, tk.lane_id()
        M, N = cute.size(g.out, mode=[1]), cute.size(g.out, mode=[0])
        for first in range(0, x.scales_of_a, 32):
            m = self.tile_of(g) * x.m + first + lane
            tk.copy_async(to, first + lane, g.scale_a, (cutlass.min(m, M - 1), k))
        if self.spec.scale_b == "128x128":  # one for each warpgroup: its 64 columns lie in one block
            col = cutlass.min(row * x.rows + lane % x.consumers * 64, N - 1)
            tk.copy_async(to, x.scales_of_a + lane, g.scale_b, (col // GROUP, k))
            return
        for j in range(x.rows // 32):
            n = 32 * j + lane
            tk.copy_async(to, x.scales_of_a + n, g.scale_b, (cutlass.min(row * x.rows + n, N - 1), k))

    def row_vectors(self, g, n):
        """Early, long before they are used: the scales and the bias of the result's columns, values of each row of the
        accumulator."""
        N, found = cute.size(g.out, mode=[0]), []
        for there, source in ((self.spec.scale_b == "row", g.scale_b), (self.spec.bias is not None, g.bias)):
            found.append(tk.rv() if there else None)
            if there:
                tk.load_rows(found[-1], source, n, N)
        return found

    @cute.jit
    def multiply(self, s: Constexpr, acc: Constexpr, steps, wg):
        if const_expr(self.spec.promote):
            self.sum_promoted(s, acc[0], steps, wg)
        else:
            SmallMGemm.multiply(self, s, acc, steps, wg)

    def mma(self, acc, b, a, a_part):
        tk.mma_ABt(acc, b, a, a_part=a_part)

    @cute.jit
    def sum_promoted(self, s: Constexpr, acc: Constexpr, steps, wg):
        full, part, row = s.pipe.ring(), tk.rt_fl(acc.cols), tk.rv()
        for _ in cutlass.range(steps, unroll=1):
            s.pipe.wait(full)
            tk.mm_ABt(part, s.b[full.stage], s.a[full.stage], a_part=wg)
            self.row_scales(s, full, row, wg)
            tk.mma_wait(0)
            self.promote(s, full, acc, part, row)
            s.pipe.release(full)
            full.advance()

    def row_scales(self, s, r, row, wg):
        """Of a step: of the columns of b that this warpgroup has."""
        if self.spec.per_step:
            here, of_columns = s.scales[None, r.stage], self.spec.scale_b == "1x128"
            for h in range(2):
                row.tensor[h] = here[self.config.scales_of_a + (64 * wg + tk.first_row() + 8 * h if of_columns else wg)]

    def promote(self, s, r, acc, part, row):
        if self.spec.per_step:
            of_a = cute.make_tensor(s.scales[None, r.stage].iterator, cute.make_layout(self.config.m))
            fma_scaled(acc, part, row, of_a)
        else:
            tk.add(acc, acc, part)

    def store(self, g, acc, vectors, n, m):
        """The epilogue of some columns of the accumulator, which are rows of the result from m on."""
        (sums,), (scales, bias), spec = acc, vectors, self.spec
        x, m = tk.rt_fl(sums.cols), m + self.tile_of(g) * self.config.m
        self.scale(g, x, sums, scales, m)
        if spec.bias is not None:
            tk.add_row(x, x, bias)
        activate(x, spec.activation, self.out)
        if spec.out == "e4m3":
            tk.mul(x, x, cute.arch.rcp_approx(g.out_scale[0]))
            store_e4m3_elements(g.out, x, n, m)
        else:
            tk.store_elements(g.out, x, n, m)

    def scale(self, g, x, sums, of_b, m):
        if self.spec.scale_b == "tensor":
            tk.mul(x, sums, g.scale_a[0] * g.scale_b[0])
        elif self.spec.scale_b == "row":
            of_a = tk.cv(x.cols)
            tk.load_cols(of_a, g.scale_a, Int32(m), cute.size(g.out, mode=[1]))
            tk.mul_outer(x, sums, of_b, of_a)
        else:
            tk.copy(x, sums)
