"""Float8 products of groups along K (gradients of experts' weights): what of a stage is another group's is masked."""
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from ... import tile as tk
from ..fp8.config import STEP
from ..fp8.epilogue import OUTPUT_BARRIER
from ..fp8.matrices import load_scales
from ..fp8.spec import GROUP
from ..fp8.state import at, transposed
from .groups import Groups

WORDS = STEP // 4  # of 32 bits in a row of a stage: one for each lane


class MaskedGroups(Groups):
    """``Groups`` along K of float8, whose operands have K contiguous: groups begin and end anywhere, and nothing
    clips at their ends.

    Where scales are of rows, steps begin where the group does, or up to 15 bytes before: TMA takes columns from units
    of 16 bytes alone. Where they change along K they are those of 128 of the whole K, and so are steps: a group has all
    that it has a part of. What is not its own, in the first and the last of them, becomes zeros in shared memory, in
    both operands: it may be NaN in either.

    consumer  |wait k0, mask, wgmma|wait k1, wgmma| .. |wait kn, mask, wgmma|

    A consumer masks its rows of A, and all of B, independently of the other one, which writes the same words over them:
    a race, which compute-sanitizer reports, and of equal values. With half of B for each, both would have to meet
    before they multiply, in the first and the last step of every tile, and the first one's ``stagger_stages``, by which
    its epilogue runs under the other's products, would be gone.
    """

    # ---- host ----------------------------------------------------------------------------------

    def rows(self, a):
        return a

    def matrices(self, b):
        return transposed(b)

    def scales_of_rows(self, given, m, steps):
        return self.scales_along_k(given, m, steps)

    def scales_of_columns(self, given, groups, n, steps):
        return self.scales_along_k(given, n, steps)

    def scales_along_k(self, given, extent, steps):
        """(extent, steps), or (groups, extent): the number of groups is not needed."""
        address, group, stride, step = given
        if self.spec.per_step:
            return at(Float32, address, cute.make_layout((extent, steps), stride=(stride, step)))
        return at(Float32, address, cute.make_layout((1 << 20, extent), stride=(group, stride)))

    # ---- device: in ----------------------------------------------------------------------------

    def first(self, t):
        """Where the tile's steps begin, in K."""
        unit = STEP if self.spec.per_step else 16
        return t.first // unit * unit

    def steps(self, g, t):
        return cutlass.max(cute.ceil_div(t.first + t.size - self.first(t), STEP), 1)

    def load_tiles(self, g, s, stage, t, k, sem):
        x, first = self.config, self.first(t)
        tk.load_async(s.a.stacked(x.m // 64)[stage], columns_from(g.a, first), (t.row, k), sem)
        tk.load_async(s.b.stacked(x.split)[stage], columns_from(g.b, first), (t.col, k), sem)

    def first_row(self, t):
        return t.row * self.config.m

    def load_scales(self, g, to, t, k):
        last = cute.ceil_div(g.k, GROUP) - 1  # an empty group at the end has a step behind it
        load_scales(self, g, to, t, cutlass.min(t.first // STEP + k, last))

    def column_scales(self, g, t):
        return g.scale_b if self.spec.per_step else g.scale_b[(t.group, None)]

    def row_scales(self, g, t):
        return g.scale_a[(t.group, None)]

    # ---- device: masks ---------------------------------------------------------------------------

    def edge(self):
        """Of the step to multiply next, the first number of K that is the group's, and where they end; counted from the
        step's beginning, so either may be outside of it."""
        return cute.make_rmem_tensor((2,), Int32)

    def begin(self, u, t):
        u.edge[0] = t.first - self.first(t)
        u.edge[1] = u.edge[0] + t.size

    @cute.jit
    def ready(self, s: Constexpr, u: Constexpr, wg):
        s.pipe.wait(u.full)
        first, end = u.edge[0], u.edge[1]
        if first > 0 or end < STEP:
            self.mask(s, u, wg, first, end)
        u.edge[0] = first - STEP
        u.edge[1] = end - STEP

    @cute.jit
    def mask(self, s: Constexpr, u: Constexpr, wg, first, end):
        """Zeros but for [first, end) of a stage's K. A warp takes every fourth row, a lane the same 4 bytes of each."""
        x, byte = self.config, 4 * tk.lane_id()
        byte_mask = Int32(0)
        for i in cutlass.range_constexpr(4):
            if byte + i >= first:
                if byte + i < end:
                    byte_mask = byte_mask | Int32(255 << 8 * i if i < 3 else -(1 << 24))
        for w in cutlass.range_constexpr(x.m_subtiles):
            self.apply_mask(s.a, u.full.stage * (x.m // 64) + wg * x.m_subtiles + w, byte_mask)
        for i in cutlass.range_constexpr(x.split):
            self.apply_mask(s.b, u.full.stage * x.split + i, byte_mask)
        tk.publish()
        tk.sync(OUTPUT_BARRIER + wg, tk.WARPGROUP)

    @cute.jit
    def apply_mask(self, ring: Constexpr, number, byte_mask):
        """Nothing is read but by lanes, two at most, whose 4 bytes are in part the group's. Another consumer, ahead or
        behind, leaves the same words."""
        words = ring.scratch(tk.st(ring.type.rows, WORDS, Int32, 128))[number].tensor
        warp, lane = tk.thread_in_warpgroup() // 32, tk.lane_id()
        if byte_mask == 0:
            for r in cutlass.range(ring.type.rows // 4, unroll=8):
                words[4 * r + warp, lane] = Int32(0)
        elif byte_mask != -1:
            for r in cutlass.range(ring.type.rows // 4, unroll=8):
                words[4 * r + warp, lane] = words[4 * r + warp, lane] & byte_mask


def columns_from(x: tk.gl, first) -> tk.gl:
    """Columns are counted from ``first`` on."""
    rows = 0 if isinstance(x.type_rows, int) else (0, 0)
    return replace(x, tensor=cute.domain_offset((rows, first), x.tensor))
