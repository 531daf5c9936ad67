"""C = A @ B in float8, scaled by blocks: a tile's last panels are written under the next tile's first products."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr

from .. import tile as tk
from . import epilogue_tile as ep
from .fp8_rolling import RollingFp8Gemm
from .fp8_state import Tile


@dataclass(frozen=True)
class Turn:
    """From one tile to the next."""

    tile: Tile  # whose sums begin
    before: Tile  # the last panels of which are in the sums yet
    any: Boolean  # is there one?


class SpreadRollingFp8Gemm(RollingFp8Gemm):
    """As RollingFp8Gemm, but a tile's last ``spread`` panels stay where they are, in the sums, until the next tile's
    first products come out to take their place. In quarters, of eight panels seven, for example:

      time           ->
      tensor cores  .. |       |x0           |y0          |z0          |w0          |x1 ..
      consumer      .. |panel 0|panels 1 .. 3|panels 4, 5 |panel 6     |panel 7     |promote x1 ..
                                              promote x0   promote y0 ..

    y0 is issued when panel 3 is out, in halves before the first (``Fp8Config.panels_first``): an activation is as quick
    as it has registers. Sums begin with the bias instead of zero, in the same step: no additions. It is fetched under
    the first products and costs 0.5 % of 4096^3 so, 1.5 % if it is fetched before, between tiles.
    """

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.stay = config.count(spec.out) - config.spread  # the first panel that does
        self.crowded = config.panels_first(spec.out)

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        order, u = self.order(g, s), self.state(s)
        first = order.first()
        number, row, col = first, Int32(0), Int32(0)
        self.fall_behind(g, s, order, number, wg)
        while number < order.tasks:
            t = self.tile(g, s, order, number)
            self.sum_over(g, s, u, Turn(t, Tile(row, col), number > first), wg)
            row, col = t.row, t.col
            number = order.following(number)
            self.write_panels(g, s, u, Tile(row, col), range(self.stay), wg)
        if number > first:
            self.write_rest(g, s, u, Tile(row, col), wg)
        tk.store_wait()

    @cute.jit
    def sum_over(self, g, s: Constexpr, u: Constexpr, turn: Constexpr, wg):
        """The tile's sums, over what is left of the one before."""
        x, steps = self.config, self.steps(g, turn.tile)
        part, rows = [tk.rt_fl(x.part) for _ in range(2)], [tk.rv() for _ in range(x.waves)]
        if steps >= x.rolling:
            self.roll(s, u, part, rows, wg, x.rolling, lambda i: self.under(g, s, u, turn, i, wg))
            self.go_on(s, u, part, rows, wg, steps - x.rolling)
        else:
            if turn.any:
                self.write_rest(g, s, u, turn.before, wg)
            self.load_bias(g, u, turn.tile)
            for p in cutlass.range_constexpr(x.waves * x.split):
                self.begin(u, p)
            for _ in cutlass.range(steps, unroll=1):
                self.roll(s, u, part, rows, wg, 1)

    @cute.jit
    def under(self, g, s: Constexpr, u: Constexpr, turn: Constexpr, i: Constexpr, wg):
        """What is done under part i of the first steps. The branch is for the first tile, and for the assembler:
        without it some of this comes between the part's wgmma, the last of which is issued 200 instructions late."""
        x = self.config
        if const_expr(i == 0):
            self.load_bias(g, u, turn.tile)
        if const_expr(i < x.waves * x.split):
            if turn.any:
                self.write_panels(g, s, u, turn.before, x.panels_under(i, self.spec.out), wg)
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

    def add_bias(self, u, part, first):
        """It is in the sums."""

    def write_panels(self, g, s, u, t, panels, wg):
        for i in panels:
            self.write_panel(g, s, u, t, i, wg, None, None)

    @cute.jit
    def write_rest(self, g, s: Constexpr, u: Constexpr, t, wg):
        self.write_panels(g, s, u, t, range(self.stay, self.stay + self.config.spread), wg)
