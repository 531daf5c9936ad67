"""C = A @ B in float8, a tile's result written while the next tile's first products run."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

from .. import tile as tk
from . import epilogue_tile as ep
from .fp8 import Fp8Gemm


@dataclass(frozen=True)
class Held:
    """A consumer's registers beside its sums."""

    panels: list  # of a finished tile, in 16 bits
    cols: Any  # scales of b's columns, a part in each lane; None where there are none


class SpreadFp8Gemm(Fp8Gemm):
    """As Fp8Gemm, of sums of all of K, and no bias or activation:

      time      ->
      consumer    |k0 .. kn|finish|k0 + panel 0|k1 + panel 1|k2 + panel 2|k3 + panel 3|k4 .. kn|finish|

    finish scales the sums and rounds them, in registers. The other consumer, ``lead`` stages apart, multiplies.
    """

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.early = False  # column scales for all panels: where they would be, results wait

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        order, u, h = self.order(g, s), self.state(s), self.held()
        number = order.first()
        self.fall_behind(g, s, order, number, wg)
        while number < order.tasks:
            t = self.tile(g, s, order, number)
            self.multiply(s, u, self.mm, wg)
            first = self.write_under(g, s, u, h, number, wg)
            if const_expr(self.spec.scales == "row"):
                self.load_row_scales(g, u, t, wg)
                ep.load_spread(h.cols, self.column_scales(g, t), t.col * self.config.n)
            for _ in cutlass.range(first, g.steps, unroll=1):
                self.next_step(s, u, wg)
            tk.mma_wait(0)
            self.release(s, u)
            self.finish(g, u, h)
            number = order.following(number)
        if number >= order.workers():  # there was a tile
            self.write_held(g, s, h, number, wg)
        tk.store_wait()

    def held(self) -> Held:
        panels = self.config.waves * self.config.n // self.panel
        cols = ep.spread(self.config.n, Float32) if self.spec.scales == "row" else None
        return Held([tk.rt(self.panel, self.out) for _ in range(panels)], cols)

    def next_step(self, s, u, wg):
        """See off a step of K and issue the next."""
        tk.mma_wait(0)
        self.release(s, u)
        self.multiply(s, u, self.mma, wg)

    @cute.jit
    def write_under(self, g, s: Constexpr, u: Constexpr, h: Constexpr, number, wg):
        """The tile before, a panel under each of this one's first steps of K, as far as it has as many. Returns the
        next step."""
        before = self.tile(g, s, self.order(g, s), number - self.order(g, s).workers())
        for i in cutlass.range_constexpr(len(h.panels)):
            if number >= self.order(g, s).workers():
                self.put(g, s, h, before, i, wg)
            if i + 1 < g.steps:
                self.next_step(s, u, wg)
        return cutlass.min(len(h.panels) + 1, g.steps)

    @cute.jit
    def write_held(self, g, s: Constexpr, h: Constexpr, number, wg):
        last = self.tile(g, s, self.order(g, s), number - self.order(g, s).workers())
        for i in cutlass.range_constexpr(len(h.panels)):
            self.put(g, s, h, last, i, wg)

    def put(self, g, s, h, t, i, wg):
        x = self.config
        each = x.n // self.panel
        at = (t.row * (x.m // 64) + wg * x.waves + i // each, t.col * each + i % each)
        whole = len(h.panels) % x.panels == 0 or i > 0
        self.send(g, s, h.panels[i], t, at, wg, (i % x.panels, x.panels - 1 if whole else 0))

    def finish(self, g, u, h):
        factor = g.scale_a[0] * g.scale_b[0] if self.spec.scales == "tensor" else None
        each = self.config.n // self.panel
        for i, panel in enumerate(h.panels):
            part = tk.columns(u.acc[i // each], i % each * self.panel, self.panel)
            if factor is None:
                cols = tk.cv(self.panel)
                ep.gather(cols, h.cols, i % each * self.panel)
                tk.mul_outer(part, part, u.rows[i // each], cols)
            else:
                tk.mul(part, part, factor)
            tk.copy(panel, part)
