"""The consumers of the float8 GEMM with a pipelined promotion and an overlapped epilogue: a tile's last subtiles are
stored under the next tile's first products."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from ... import tile as tk
from ..epilogue import registers as ep
from .state import State, Tile


@dataclass(frozen=True)
class TilePair:
    """From one tile to the next."""

    tile: Tile  # whose sums begin
    before: Tile  # the last epilogue subtiles of which are in the sums yet
    any: Boolean  # is there one?


class OverlappedPromotionConsumer:
    """A consumer of promoted sums. A tile's last ``overlap_epilogue`` subtiles stay where they are, in the sums,
    until the next tile's first products come out to take their place. In quarters, of eight subtiles seven, for
    example:

      time           ->
      tensor cores  .. |       |x0           |y0          |z0          |w0          |x1 ..
      consumer      .. |store 0|stores 1 .. 3|stores 4, 5 |store 6     |store 7     |promote x1 ..
                                              promote x0   promote y0 ..

    y0 is issued when subtile 3 is out, in halves before the first (``Fp8Config.stores_before_product``): an activation
    is as quick as it has registers. Sums begin with the bias instead of zero, in the same step: no additions. It is
    fetched under the first products and costs 0.5 % of 4096^3 so, 1.5 % if it is fetched before, between tiles.
    """

    def __init__(self, mainloop, epilogue, stagger):
        """Of a ``PipelinedPromotion``, an ``Epilogue`` and a ``Stagger``."""
        self.mainloop, self.epilogue, self.stagger = mainloop, epilogue, stagger
        self.spec, self.config, self.operands = epilogue.spec, epilogue.config, epilogue.operands
        # the first subtile that stays
        self.first_pending = self.config.n_stores(self.spec.out) - self.config.overlap_epilogue

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        order, u = self.operands.order(g, s), State.of(self.spec, self.config, s.pipe)
        first = order.first()
        number, row, col = first, Int32(0), Int32(0)
        self.stagger.wait(g, s, order, number, wg)
        while number < order.tasks:
            t = self.operands.tile(g, s, order, number)
            self.sum_over(g, s, u, TilePair(t, Tile(row, col), number > first), wg)
            row, col = t.row, t.col
            number = order.following(number)
            self.write_subtiles(g, s, u, Tile(row, col), range(self.first_pending), wg)
        if number > first:
            self.write_remaining(g, s, u, Tile(row, col), wg)
        tk.store_wait()

    @cute.jit
    def sum_over(self, g, s: Constexpr, u: Constexpr, pair: Constexpr, wg):
        """The tile's sums, over what is left of the one before."""
        x, steps = self.config, self.operands.steps(g, pair.tile)
        part, rows = [tk.rt_fl(x.part) for _ in range(2)], [tk.rv() for _ in range(x.m_subtiles)]
        if steps >= x.promotion_unroll:
            self.mainloop.promote_steps(s, u, part, rows, wg, x.promotion_unroll,
                                        lambda i: self.under(g, s, u, pair, i, wg))
            self.mainloop.promote_remaining(s, u, part, rows, wg, steps - x.promotion_unroll)
        else:
            if pair.any:
                self.write_remaining(g, s, u, pair.before, wg)
            self.epilogue.load_bias(g, u, pair.tile)
            for p in cutlass.range_constexpr(x.m_subtiles * x.split):
                self.begin(u, p)
            for _ in cutlass.range(steps, unroll=1):
                self.mainloop.promote_steps(s, u, part, rows, wg, 1)

    @cute.jit
    def under(self, g, s: Constexpr, u: Constexpr, pair: Constexpr, i: Constexpr, wg):
        """What is done under part i of the first steps. The branch is for the first tile, and for the assembler:
        without it some of this comes between the part's wgmma, the last of which is issued 200 instructions late."""
        x = self.config
        if const_expr(i == 0):
            self.epilogue.load_bias(g, u, pair.tile)
        if const_expr(i < x.m_subtiles * x.split):
            if pair.any:
                self.write_subtiles(g, s, u, pair.before, x.stores_under_part(i, self.spec.out), wg)
            self.begin(u, i)

    def begin(self, u, p):
        """A part of the sums."""
        x = self.config
        if self.spec.bias is None:
            tk.zero(u.acc[p])
            return
        bias = tk.cv(x.part)
        ep.gather(bias, u.bias, p % x.split * x.part)
        for r in range(2):
            u.acc[p].rows_view[r, None].store(bias.tensor.load())

    def write_subtiles(self, g, s, u, t, subtiles, wg):
        for i in subtiles:
            self.epilogue.write_subtile(g, s, u, t, i, wg, None, None)

    @cute.jit
    def write_remaining(self, g, s: Constexpr, u: Constexpr, t, wg):
        self.write_subtiles(g, s, u, t, range(self.first_pending, self.first_pending + self.config.overlap_epilogue),
                            wg)
