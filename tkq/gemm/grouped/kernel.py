"""Products of groups: one launch for all of them, whose sizes are known on the device alone."""
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

from ... import tile as tk
from ..fp8.config import Fp8Config
from ..fp8.kernel import Fp8Gemm
from ..fp8.overlapped_epilogue import OverlappedEpilogueFp8Gemm
from ..fp8.spec import BYTES, GROUP
from ..fp8.state import at, transposed
from ..raster import raster
from .spec import MOST_GROUPS, GroupedSpec


@dataclass(frozen=True)
class Globals:
    a: tk.gl
    b: tk.gl
    c: tk.gl
    offsets: cute.Tensor  # (G,) int32: where each group ends
    scale_a: Any  # (M,) or (M, steps)
    scale_b: Any  # (G, N), or (G, N / 128, steps)
    m: Int32
    n: Int32
    k: Int32
    groups: Int32


@dataclass(frozen=True)
class Tile:
    """Where a block works: in tiles of its group; the group, where in a's rows (or, along K, in K) it begins, and how
    many of them it has."""

    row: Int32
    col: Int32
    group: Int32
    first: Int32
    size: Int32


@dataclass(frozen=True)
class Shared:
    a: tk.SharedTile
    b: tk.SharedTile
    c: tk.SharedTile
    scales: Any
    pipe: tk.Pipe
    begins: cute.Tensor  # (G + 1,): where each group begins
    counts: cute.Tensor  # (G + 1,): cluster tiles of all groups before


@dataclass(frozen=True)
class Order:
    """Numbers of cluster tiles, of all groups, one after the other; dealt out as by ``tk.Schedule``."""

    tasks: Int32
    cluster: Constexpr[int]
    cursor: cute.Tensor  # the group of the last tile: numbers only grow

    def workers(self):
        """The fewest clusters that need no more waves than all: see ``plan.even_blocks``. At least one."""
        clusters = cute.arch.grid_dim()[0] // self.cluster
        waves = cutlass.max(cute.ceil_div(self.tasks, clusters), 1)
        return cutlass.max(cute.ceil_div(self.tasks, waves), 1)

    def first(self):
        """For those that have no work: past the end."""
        mine = Int32(cute.arch.block_idx()[0] // self.cluster)
        return cutlass.select_(mine < self.workers(), mine, self.tasks)

    def following(self, number):
        return number + self.workers()


class GroupedGemm(Fp8Gemm):
    """Fp8Gemm, whose tiles belong to groups. 16-bit operands, too.

    Before the roles part, a warp of each block reads the offsets and counts every group's tiles into shared memory;
    then every role finds the group of each of its tiles there. Nothing about sizes is known before: groups may be
    empty, and a block may have no tile.

    Along M, A's tile begins at its group's first row and may go on into the next group: rows that are not stored. C's
    goes out by a descriptor that clips at the group's end. Along K, both operands' tiles are clipped at the group's
    end, where zeros come in; an empty group has one step, of zeros.
    """

    def __init__(self, spec: GroupedSpec, config: Fp8Config):
        super().__init__(spec, config)
        x, step = config, spec.step
        self.along_k = spec.along == "k"
        m_major = self.along_k and spec.b_major == "n"
        self.a_tile = tk.st(step, x.m, self.a_dtype) if m_major else tk.st(x.m, step, self.a_dtype)
        self.b_tile = tk.st(x.n, step, self.b_dtype) if spec.b_major == "k" else tk.st(step, x.n, self.b_dtype)
        self.mm, self.mma = {(False, "k"): (tk.mm_ABt, tk.mma_ABt), (False, "n"): (tk.mm_AB, tk.mma_AB),
                             (True, "n"): (tk.mm_AtB, tk.mma_AtB)}[m_major, spec.b_major]

    # ---- host ----------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, offsets: cute.Tensor, scale_a: tuple,
                 scale_b: tuple, blocks: Int32, stream: cuda.CUstream):
        """a (M, K); b (G, K, N) or, along K, (K, N); c (M, N), or (G, M, N)."""
        x, groups = self.config, offsets.shape[0]
        m, k, n = a.shape[0], a.shape[1], b.shape[2 - self.along_k]
        across, one = (x.cluster, 1) if const_expr(x.cluster_along_n) else (1, x.cluster)
        steps = cute.ceil_div(k, GROUP)
        g = Globals(
            a=tk.gl.load(self.rows(a), self.a_tile, across), b=tk.gl.load(self.matrices(b), self.b_tile, one),
            c=tk.gl.store(last_first(c) if const_expr(self.along_k) else tk.ragged_store(deep(c)), self.c_tile),
            offsets=offsets, scale_a=self.row_scales(scale_a, m, steps),
            scale_b=self.group_scales(scale_b, groups, n, steps), m=m, n=n, k=k, groups=groups)
        self.kernel(g).launch(grid=[blocks // x.cluster * x.cluster, 1, 1],
                              block=[tk.WARPGROUP * (1 + x.consumers), 1, 1], cluster=[x.cluster, 1, 1], stream=stream,
                              min_blocks_per_mp=1, use_pdl=x.pdl)

    def rows(self, a):
        """a as TMA takes it: along K as (K, M), in pieces of K."""
        return tk.ragged(deep(transposed(a))) if self.along_k else a

    def matrices(self, b):
        """b as TMA takes it: (G, K, N) as (N, K, G) or (K, N, G); along K in pieces of K."""
        if self.along_k:
            return tk.ragged(deep(b))
        return cute.make_tensor(b.iterator, cute.select(b.layout, [2, 1, 0] if self.spec.b_major == "k" else [1, 2, 0]))

    def row_scales(self, given, m, steps):
        if self.spec.scale_b == "none":
            return None
        address, _, stride, step = given
        layout = cute.make_layout((m, steps), stride=(stride, step)) if self.spec.per_step else cute.make_layout(
            (m,), stride=(stride,))
        return at(Float32, address, layout)

    def group_scales(self, given, groups, n, steps):
        if self.spec.scale_b == "none":
            return None
        address, group, stride, step = given
        if self.spec.per_step:
            layout = cute.make_layout((groups, cute.ceil_div(n, GROUP), steps), stride=(group, stride, step))
        else:
            layout = cute.make_layout((groups, n), stride=(group, stride))
        return at(Float32, address, layout)

    @cute.kernel
    def kernel(self, g: Globals):
        self.roles(g)

    # ---- device: which tile ------------------------------------------------------------------------

    def shared(self, g, al) -> Shared:
        s = super().shared(g, al)
        if const_expr(self.config.pdl):  # offsets may be what the kernel before writes
            cute.arch.griddepcontrol_wait()
        begins, counts = (al.vector(MOST_GROUPS + 1, dtype=Int32)[None, 0] for _ in range(2))
        self.count(g, begins, counts)
        tk.sync_block()
        return Shared(s.a, s.b, s.c, s.scales, s.pipe, begins, counts)

    def stage_tiles(self):
        if self.spec.a in ("e4m3", "e5m2"):
            return super().stage_tiles()
        return self.a_tile, self.b_tile

    def span(self):
        """Rows and columns of a cluster's tile."""
        x = self.config
        return (x.m, x.n * x.cluster) if x.cluster_along_n else (x.m * x.cluster, x.n)

    @cute.jit
    def count(self, g, begins: cute.Tensor, counts: cute.Tensor):
        """The table, by warp 0: 32 groups at a time. An offset below one before counts as that one, and none is below 0
        or past the end: whatever the offsets say, no memory is touched that is not the caller's, and none twice."""
        if tk.warp_id() == 0:
            lane, limit = tk.lane_id(), g.k if const_expr(self.along_k) else g.m
            tall, wide = self.span()
            cols, total, most = cute.ceil_div(g.n, wide), Int32(0), Int32(0)
            if lane == 0:
                counts[0] = Int32(0)
            for base in cutlass.range(0, g.groups, 32, unroll=1):
                group = base + lane
                begin, end = Int32(0), Int32(0)
                if group < g.groups:
                    end = cutlass.min(cutlass.max(g.offsets[group], 0), limit)
                    if group > 0:
                        begin = cutlass.min(cutlass.max(g.offsets[group - 1], 0), limit)
                # begin is below what the groups before have reached, or end below begin, where offsets fall alone
                if cute.arch.vote_ballot_sync((group < g.groups) & ((end < begin) | (begin < most))) != 0:
                    begin, end = self.risen(end, most)
                most = cute.arch.shuffle_sync(end, 31)
                tiles = Int32(0)
                if group < g.groups:
                    if const_expr(self.along_k):
                        tiles = cute.ceil_div(g.m, tall) * cols
                    else:
                        tiles = cute.ceil_div(cutlass.max(end - begin, 0), tall) * cols
                for i in cutlass.range_constexpr(5):
                    below = cute.arch.shuffle_sync_up(tiles, 1 << i, mask_and_clamp=0)
                    if lane >= 1 << i:
                        tiles += below
                if group < g.groups:
                    begins[group] = begin
                    begins[group + 1] = end  # the next group writes the same, but for the last
                    counts[group + 1] = total + tiles
                total += cute.arch.shuffle_sync(tiles, 31)

    @cute.jit
    def risen(self, end, most):
        """(begin, end) of each lane's group where offsets fall: the largest end of the groups before, which ``most`` is
        of those before lane 0's, and of these and its own."""
        end = cutlass.max(end, most)
        for i in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(end, 1 << i, mask_and_clamp=0)
            if tk.lane_id() >= 1 << i:
                end = cutlass.max(end, below)
        begin = cute.arch.shuffle_sync_up(end, 1, mask_and_clamp=0)
        return cutlass.select_(tk.lane_id() == 0, most, begin), end

    def order(self, g, s):
        cursor = cute.make_rmem_tensor((1,), Int32)
        cursor[0] = Int32(0)
        return Order(s.counts[g.groups], self.config.cluster, cursor)

    @cute.jit
    def seek(self, counts: cute.Tensor, cursor: cute.Tensor, number):
        """Move the cursor to the group that has tile ``number``."""
        while counts[cursor[0] + 1] <= number:
            cursor[0] = cursor[0] + 1

    def tile(self, g, s, order, number) -> Tile:
        self.seek(s.counts, order.cursor, number)
        group = cute.arch.make_warp_uniform(order.cursor[0])
        first, end = (cute.arch.make_warp_uniform(s.begins[group + i]) for i in range(2))
        size = cutlass.max(end - first, 0)
        tall, wide = self.span()
        rows = cute.ceil_div(g.m if self.along_k else size, tall)
        row, col = raster(number - s.counts[group], rows, cute.ceil_div(g.n, wide), self.config.raster_group,
                          cutlass.min)
        return Tile(*self.in_cluster(row, col), group, first, size)

    def steps(self, g, t):
        if self.along_k:
            return cutlass.max(cute.ceil_div(t.size, self.spec.step), 1)
        return cute.ceil_div(g.k, self.spec.step)

    @cute.jit
    def sum_all(self, g, s: Constexpr, u: Constexpr, t, wg):
        """A consumer whose rows all lie past its group's end only lets the stages go: small groups leave half of a
        tile to it, and what it does not multiply costs no energy and no time of the other's."""
        if const_expr(self.along_k):
            self.sum_products(g, s, u, t, wg)
        else:
            if self.has_rows(t, wg):
                self.sum_products(g, s, u, t, wg)
            else:
                self.let_go(g, s, u, t)

    def has_rows(self, t, wg):
        """Is any row of this consumer's one of the tile's group?"""
        return t.row * self.config.m + wg * (64 * self.config.m_subtiles) < t.size

    @cute.jit
    def let_go(self, g, s: Constexpr, u: Constexpr, t):
        for _ in cutlass.range(self.steps(g, t), unroll=1):
            s.pipe.wait(u.full)
            u.full.advance()
            self.release(s, u)

    # ---- device: in and out --------------------------------------------------------------------------

    def load_tiles(self, g, s, stage, t, k, sem):
        x = self.config
        if self.along_k:
            end = t.first + t.size
            tk.load_async(s.a[stage], g.a.part(t.size), (end, 0, k, t.row), sem)
            tk.load_async(s.b[stage], g.b.part(t.size), (end, 0, k, t.col), sem)
            return
        whole = self.spec.scale_b == "none"
        a = s.a[stage] if whole else s.a.stacked(x.m // 64)[stage]
        b = s.b[stage] if whole else s.b.stacked(x.split)[stage]
        tk.load_async(a, g.a.rows_from(t.first), (t.row, k), sem)
        tk.load_async(b, g.b, (t.group, t.col, k) if self.spec.b_major == "k" else (t.group, k, t.col), sem)

    def multiply_subtile(self, product, acc, s, r, w, wg):
        if self.spec.scale_b != "none":
            super().multiply_subtile(product, acc, s, r, w, wg)
        else:
            product(acc, s.a[r.stage], s.b[r.stage], a_part=wg * self.config.m_subtiles + w)

    def first_row(self, t):
        return t.first + t.row * self.config.m

    def column_scales(self, g, t):
        return g.scale_b[(t.group, *(None,) * (cute.rank(g.scale_b) - 1))]

    def store_subtile(self, g, subtile, t, at):
        if self.along_k:
            tk.store_async(g.c, subtile, (t.group, *at))
        else:
            tk.store_async(g.c.part(t.size), subtile, (t.first + t.size, 0, *at))


def deep(x: cute.Tensor) -> cute.Tensor:
    """(rows, cols) as (rows, cols, 1)."""
    return cute.make_tensor(x.iterator, cute.append(x.layout, cute.make_layout(1)))


def last_first(x: cute.Tensor) -> cute.Tensor:
    """(G, M, N) as (M, N, G)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 2, 0]))


def operands(spec: GroupedSpec):
    """Fake a, b, c and offsets: any sizes, and what TMA asks of strides."""
    from ...runtime.compile import fake

    M, N, K, G = fake.sym(), fake.sym(), fake.sym(), fake.sym()

    def matrix(dtype, shape, rows_contiguous=True):
        """The last two dimensions, either contiguous; any pitch of whole units of 16 bytes."""
        outer = [fake.sym64(divisibility=16 // BYTES[dtype]) for _ in shape[:-1]]
        *lead, pitch = outer
        return fake.tensor(dtype, shape, (*lead, pitch, 1) if rows_contiguous else (*lead, 1, pitch))

    offsets = fake.tensor("int32", (G,), (1,), align=4)
    if spec.along == "k":
        return (matrix(spec.a, (M, K), False), matrix(spec.b, (K, N)), matrix(spec.out, (G, M, N)), offsets)
    return (matrix(spec.a, (M, K)), matrix(spec.b, (G, K, N), spec.b_major == "n"), matrix(spec.out, (M, N)), offsets)


def build(spec: GroupedSpec, config: Fp8Config):
    """(kernel, fake arguments): a, b, c, offsets; (address, stride of groups, of rows or columns, of steps) of each
    operand's scales; how many blocks to launch."""
    scales = (Int64(1),) * 4

    kernel = OverlappedEpilogueGroupedGemm if config.overlap_epilogue else GroupedGemm
    return kernel(spec, config), (*operands(spec), scales, scales, Int32(1))


# ---- Grouped GEMM with an overlapped epilogue: a tile is stored while the next tile's first products run.


class OverlappedEpilogueGroupedGemm(OverlappedEpilogueFp8Gemm, GroupedGemm):
    """GroupedGemm's tiles, written as OverlappedEpilogueFp8Gemm does. Each consumer has two cursors in the table of
    groups: of the tile that it multiplies, and of the one before, which it writes."""

    @cute.jit
    def one_tile(self, g, s: Constexpr, u: Constexpr, pending: Constexpr, t, last, number, wg):
        if const_expr(self.along_k):
            super().one_tile(g, s, u, pending, t, last, number, wg)
        else:
            if self.has_rows(t, wg):
                super().one_tile(g, s, u, pending, t, last, number, wg)
            else:
                if number >= last.workers():
                    self.write_pending(g, s, pending, self.tile(g, s, last, number - last.workers()), wg)
                self.let_go(g, s, u, t)
