"""A, B, C and the scales of the float8 GEMM: which tiles a block takes, how a step of one comes into a stage, how a
stage is multiplied, where C's subtiles go."""
import cutlass

from ... import tile as tk
from ..raster import raster
from .config import Fp8Config
from .spec import GROUP, Fp8Spec
from .state import Tile, Tiles


class Matrices:
    """One product's operands; ``grouped.groups.Groups`` are those of many. Producer and consumers take the same
    tiles."""

    always_rows = True  # has each consumer rows of every tile?

    def __init__(self, spec: Fp8Spec, config: Fp8Config, tiles: Tiles):
        self.spec, self.config, self.tiles, self.mm, self.mma = spec, config, tiles, tk.mm_ABt, tk.mma_ABt

    def prepare(self, g, s, al):
        """What the roles share beside stages and store buffers: nothing."""
        return s

    # ---- which tile

    def order(self, g, s):
        return tk.Schedule(g.rows * g.cols, "static", self.config.cluster)

    def tile(self, g, s, order, number) -> Tile:
        return Tile(*in_cluster(self.config, *raster(number, g.rows, g.cols, self.config.raster_group, cutlass.min)))

    def steps(self, g, t):
        return g.steps

    # ---- in

    def load_stage(self, g, s, t, k, r):
        load_stage(self, g, s, t, k, r)

    def load_tiles(self, g, s, stage, t, k, sem):
        x = self.config
        tk.load_async(s.a.stacked(x.m // 64)[stage], g.a, (t.row, k), sem)
        tk.load_async(s.b.stacked(x.split)[stage], g.b, (t.col, k), sem)

    def load_scales(self, g, to, t, k):
        load_scales(self, g, to, t, k)

    def first_row(self, t):
        """Of a tile, among the rows of scales."""
        return t.row * self.config.m

    def row_scales(self, g, t):
        """Those of a's rows, where there is one each."""
        return g.scale_a

    def column_scales(self, g, t):
        """Those of b's columns, or of its columns and steps."""
        return g.scale_b

    # ---- products

    def edge(self):
        """What a consumer keeps of where the steps are the tile's own: all are."""

    def begin(self, u, t):
        """A tile of a consumer."""

    def ready(self, s, u, wg):
        """Wait until a step's tiles are what is to be multiplied."""
        s.pipe.wait(u.full)

    def multiply(self, product, acc, s, r, w, wg):
        """Issue the product of a subtile of 64 rows."""
        product(acc, rows_of(self.config, s, r, w, wg), s.b[r.stage])

    # ---- out

    def store_subtile(self, g, subtile, t, at):
        """at: (row, column) in subtiles."""
        tk.store_async(g.c, subtile, at)


def in_cluster(config: Fp8Config, row, col):
    """This block's (row, column), from its cluster's."""
    if config.cluster_along_n:
        return row, col * config.cluster + tk.cluster_rank()
    return row * config.cluster + tk.cluster_rank(), col


def rows_of(config: Fp8Config, s, r, w, wg):
    """A consumer's subtile w of A, in a stage."""
    return s.a[r.stage * (config.m // 64) + wg * config.m_subtiles + w]


# ---- a stage of ``operands``, which are Matrices or Groups


def load_stage(operands, g, s, t, k, r):
    """Acquire it; A's and B's tile into it, and the step's scales where there are such."""
    sem = s.pipe.acquire(r)
    operands.load_tiles(g, s, r.stage, t, k, sem)
    if operands.spec.per_step:
        operands.load_scales(g, s.scales[None, r.stage], t, k)
        tk.copy_async_arrive(sem)


def load_scales(operands, g, to, t, k):
    """A step's scales, by the lanes of a warp. Past the end: the last ones, for sums that are not stored."""
    x, lane = operands.config, tk.lane_id()
    row0, col0 = operands.first_row(t), t.col * x.n
    of_columns = operands.column_scales(g, t)
    for j in range(x.m // 32):
        tk.copy_async(to, 32 * j + lane, g.scale_a, (cutlass.min(row0 + 32 * j + lane, g.m - 1), k))
    if operands.spec.scale_b == "128x128":  # one for each chunk of columns: whatever of n, it lies in one block
        col = cutlass.min(col0 + lane % (x.n // x.chunk) * x.chunk, g.n - 1)
        tk.copy_async(to, x.m + lane, of_columns, (col // GROUP, k))
        return
    for j in range(-(-x.n // 32)):
        col = lane + 32 * j if x.n % 32 == 0 else (lane + 32 * j) % x.n
        tk.copy_async(to, x.m + col, of_columns, (cutlass.min(col0 + col, g.n - 1), k))


def load_row_scales(operands, g, u, t, wg):
    """A scale for each row of a consumer's, into registers."""
    x = operands.config
    for w in range(x.m_subtiles):
        scales, row = operands.row_scales(g, t), operands.first_row(t) + 64 * (wg * x.m_subtiles + w)
        tk.load_rows(u.rows[w], scales, row, g.m)
