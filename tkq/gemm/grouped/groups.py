"""The operands of a grouped GEMM, as TMA takes them, group by group."""
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ... import tile as tk
from ..fp8.config import Fp8Config
from ..fp8.matrices import load_scales, load_stage, rows_of
from ..fp8.spec import FP8, GROUP
from ..fp8.state import Tiles, at, transposed
from .spec import MOST_GROUPS, GroupedSpec
from .table import GroupTable


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
class Shared:
    a: tk.SharedTile
    b: tk.SharedTile
    c: tk.SharedTile
    scales: Any
    pipe: tk.Pipe
    begins: cute.Tensor  # (G + 1,): where each group begins
    counts: cute.Tensor  # (G + 1,): cluster tiles of all groups before


def tiles_of(spec: GroupedSpec, config: Fp8Config) -> Tiles:
    """As of the float8 GEMM; of 16 bits a stage is one tile of A and one of B, as they lie in memory."""
    tiles, x, step = Tiles.of(spec, config), config, spec.step
    if spec.a in FP8:
        return tiles
    dtype = tk.element_type(spec.a)
    a = tk.st(step, x.m, dtype) if spec.m_major else tk.st(x.m, step, dtype)
    b = tk.st(x.n, step, dtype) if spec.b_major == "k" else tk.st(step, x.n, dtype)
    return replace(tiles, a=a, b=b, a_part=a, b_part=b)


class Groups:
    """Which tiles a block takes, how a stage is loaded and multiplied, where C's subtiles go: ``fp8.matrices.Matrices``
    of many products.

    Along M, A's tile begins at its group's first row and may go on into the next group: rows that are not stored. C's
    goes out by a descriptor that clips at the group's end. Along K, both operands' tiles are clipped at the group's
    end, where zeros come in; an empty group has one step, of zeros.
    """

    def __init__(self, spec: GroupedSpec, config: Fp8Config, tiles: Tiles):
        self.spec, self.config, self.tiles, self.along_k = spec, config, tiles, spec.along == "k"
        self.table = GroupTable(config, self.along_k)
        self.always_rows = self.along_k
        self.mm, self.mma = {(False, "k"): (tk.mm_ABt, tk.mma_ABt), (False, "n"): (tk.mm_AB, tk.mma_AB),
                             (True, "n"): (tk.mm_AtB, tk.mma_AtB)}[spec.m_major, spec.b_major]

    # ---- host ----------------------------------------------------------------------------------

    def rows(self, a):
        """a as TMA takes it: along K as (K, M), in pieces of K."""
        return tk.ragged(deep(transposed(a))) if self.along_k else a

    def matrices(self, b):
        """b as TMA takes it: (G, K, N) as (N, K, G) or (K, N, G); along K in pieces of K."""
        if self.along_k:
            return tk.ragged(deep(b))
        return cute.make_tensor(b.iterator, cute.select(b.layout, [2, 1, 0] if self.spec.b_major == "k" else [1, 2, 0]))

    def scales_of_rows(self, given, m, steps):
        if self.spec.scale_b == "none":
            return None
        address, _, stride, step = given
        layout = cute.make_layout((m, steps), stride=(stride, step)) if self.spec.per_step else cute.make_layout(
            (m,), stride=(stride,))
        return at(Float32, address, layout)

    def scales_of_columns(self, given, groups, n, steps):
        if self.spec.scale_b == "none":
            return None
        address, group, stride, step = given
        if self.spec.per_step:
            layout = cute.make_layout((groups, cute.ceil_div(n, GROUP), steps), stride=(group, stride, step))
        else:
            layout = cute.make_layout((groups, n), stride=(group, stride))
        return at(Float32, address, layout)

    # ---- device: which tile ------------------------------------------------------------------------

    def prepare(self, g, s, al) -> Shared:
        """Beside stages and store buffers, the table."""
        if const_expr(self.config.pdl):  # offsets may be what the kernel before writes
            cute.arch.griddepcontrol_wait()
        begins, counts = (al.vector(MOST_GROUPS + 1, dtype=Int32)[None, 0] for _ in range(2))
        self.table.count(g, begins, counts)
        tk.sync_block()
        return Shared(s.a, s.b, s.c, s.scales, s.pipe, begins, counts)

    def order(self, g, s):
        return self.table.order(g, s)

    def tile(self, g, s, order, number):
        return self.table.tile(g, s, order, number)

    def steps(self, g, t):
        if self.along_k:
            return cutlass.max(cute.ceil_div(t.size, self.spec.step), 1)
        return cute.ceil_div(g.k, self.spec.step)

    def has_rows(self, t, wg):
        """Is any row of this consumer's one of the tile's group?"""
        return t.row * self.config.m + wg * (64 * self.config.m_subtiles) < t.size

    # ---- device: in, products, out -------------------------------------------------------------------

    def load_stage(self, g, s, t, k, r):
        load_stage(self, g, s, t, k, r)

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

    def load_scales(self, g, to, t, k):
        load_scales(self, g, to, t, k)

    def edge(self):
        """As of ``Matrices``: all of a step is the group's own."""

    def begin(self, u, t):
        """A tile of a consumer."""

    def ready(self, s, u, wg):
        s.pipe.wait(u.full)

    def multiply(self, product, acc, s, r, w, wg):
        if self.spec.scale_b != "none":
            product(acc, rows_of(self.config, s, r, w, wg), s.b[r.stage])
        else:
            product(acc, s.a[r.stage], s.b[r.stage], a_part=wg * self.config.m_subtiles + w)

    def row_scales(self, g, t):
        return g.scale_a

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
