"""C = A @ B in float8 with an overlapped epilogue: a tile is stored while the next tile's first products run."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from ... import tile as tk
from ..epilogue import registers as ep
from .kernel import Fp8Gemm
from .pipelined_promotion import PipelinedPromotionFp8Gemm
from .state import Tile


@dataclass(frozen=True)
class PendingTile:
    """A consumer's registers beside its sums."""

    subtiles: list  # of a finished tile, in 16 bits
    cols: Any  # scales of b's columns, a part in each lane; None where there are none


class OverlappedEpilogueFp8Gemm(Fp8Gemm):
    """As Fp8Gemm, of sums of all of K:

      time      ->
      consumer    |k0 .. kn|finish|k0 + store 0|k1 + store 1|k2 + store 2|k3 + store 3|k4 .. kn|finish|

    finish scales the sums, adds the bias, and rounds them, in registers. An activation is computed with its panel, or a
    half of it under each of two steps: the product is rounded before and after it, as where both are calls of their
    own. The other consumer, ``stagger_stages`` stages apart, multiplies.
    """

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.prefetch_scales = False  # column scales for all panels: where they would be, results wait

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        order, last, u, pending = self.order(g, s), self.order(g, s), self.state(s), self.pending()
        first = order.first()
        number = first
        self.stagger(g, s, order, number, wg)
        while number < order.tasks:
            self.one_tile(g, s, u, pending, self.tile(g, s, order, number), last, number, wg)
            number = order.following(number)
        if number > first:  # there was a tile
            self.write_pending(g, s, pending, self.tile(g, s, last, number - last.workers()), wg)
        tk.store_wait()

    @cute.jit
    def one_tile(self, g, s: Constexpr, u: Constexpr, pending: Constexpr, t, last, number, wg):
        """last: the order for the tile before."""
        self.multiply(s, u, self.mm, wg)
        first = self.write_under(g, s, u, pending, t, last, number, wg)
        if const_expr(self.spec.scale_b == "row"):
            self.load_row_scales(g, u, t, wg)
            ep.load_spread(pending.cols, self.column_scales(g, t), t.col * self.config.n)
        self.load_bias(g, u, t)
        for _ in cutlass.range(first, self.steps(g, t), unroll=1):
            self.next_step(s, u, wg)
        tk.mma_wait(0)
        self.release(s, u)
        self.finish(g, u, pending)

    def pending(self) -> PendingTile:
        x, spec = self.config, self.spec
        cols = ep.spread(x.n, Float32) if spec.scale_b == "row" else None
        return PendingTile([tk.rt(self.store_n, self.out) for _ in range(x.m_subtiles * x.n // self.store_n)], cols)

    def next_step(self, s, u, wg):
        """Retire a K step and issue the next."""
        tk.mma_wait(0)
        self.release(s, u)
        self.multiply(s, u, self.mma, wg)

    @cute.jit
    def write_under(self, g, s: Constexpr, u: Constexpr, pending: Constexpr, t, last, number, wg):
        """The tile before, a panel or a half of one under each of this one's first steps of K, as far as it has as
        many. Returns the next step."""
        steps, before = self.steps(g, t), self.tile(g, s, last, cutlass.max(number - last.workers(), 0))
        pieces = self.config.overlap_epilogue if const_expr(self.spec.activation is not None) else 1
        for i in cutlass.range_constexpr(len(pending.subtiles)):
            for piece in cutlass.range_constexpr(pieces):
                if number >= last.workers():
                    self.activate(pending, i, piece, pieces)
                    if const_expr(piece == pieces - 1):
                        self.put(g, s, pending.subtiles[i], before, i, wg)
                if pieces * i + piece + 1 < steps:
                    self.next_step(s, u, wg)
        return cutlass.min(pieces * len(pending.subtiles) + 1, steps)

    @cute.jit
    def write_pending(self, g, s: Constexpr, pending: Constexpr, t, wg):
        for i in cutlass.range_constexpr(len(pending.subtiles)):
            self.activate(pending, i, 0, 1)
            self.put(g, s, pending.subtiles[i], t, i, wg)

    def activate(self, pending, i, piece, pieces):
        """A piece of panel i, where there is an activation, in its place: in registers of its own it would spill."""
        if self.spec.activation is not None:
            width = self.store_n // pieces
            part = tk.columns(pending.subtiles[i], piece * width, width)
            tk.apply_narrow(part, ep.activation(self.spec.activation, self.out), part)

    def put(self, g, s, result, t, i, wg):
        x = self.config
        self.send(g, s, result, t, self.place(t, i, wg), wg,
                  (i % x.store_buffers, x.stores_in_flight(i, self.spec.out)))

    def finish(self, g, u, pending):
        factor = g.scale_a[0] * g.scale_b[0] if self.spec.scale_b == "tensor" else None
        each = self.config.n // self.store_n
        for i, subtile in enumerate(pending.subtiles):
            part = self.subtile_of(u, i)
            if pending.cols is not None:
                cols = tk.cv(self.store_n)
                ep.gather(cols, pending.cols, i % each * self.store_n)
                tk.mul_outer(part, part, u.rows[i // each], cols)
            elif factor is not None:
                tk.mul(part, part, factor)
            self.add_bias(u, part, i % each * self.store_n)
            tk.copy(subtile, part)


# ---- C = A @ B in float8, 1x128 and 128x128 scales, pipelined promotion and overlapped epilogue: a tile's last
# subtiles are stored under the next tile's first products.


@dataclass(frozen=True)
class TilePair:
    """From one tile to the next."""

    tile: Tile  # whose sums begin
    before: Tile  # the last panels of which are in the sums yet
    any: Boolean  # is there one?


class OverlappedPipelinedFp8Gemm(PipelinedPromotionFp8Gemm):
    """As PipelinedPromotionFp8Gemm, but a tile's last ``overlap_epilogue`` panels stay where they are, in the sums,
    until the next tile's first products come out to take their place. In quarters, of eight panels seven, for example:

      time           ->
      tensor cores  .. |       |x0           |y0          |z0          |w0          |x1 ..
      consumer      .. |panel 0|panels 1 .. 3|panels 4, 5 |panel 6     |panel 7     |promote x1 ..
                                              promote x0   promote y0 ..

    y0 is issued when panel 3 is out, in halves before the first (``Fp8Config.stores_before_product``): an activation is
    as quick as it has registers. Sums begin with the bias instead of zero, in the same step: no additions. It is
    fetched under the first products and costs 0.5 % of 4096^3 so, 1.5 % if it is fetched before, between tiles.
    """

    def __init__(self, spec, config):
        super().__init__(spec, config)
        self.first_pending = config.n_stores(spec.out) - config.overlap_epilogue  # the first panel that does
        self.few_special = config.stores_before_product(spec.out)

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        order, u = self.order(g, s), self.state(s)
        first = order.first()
        number, row, col = first, Int32(0), Int32(0)
        self.stagger(g, s, order, number, wg)
        while number < order.tasks:
            t = self.tile(g, s, order, number)
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
        x, steps = self.config, self.steps(g, pair.tile)
        part, rows = [tk.rt_fl(x.part) for _ in range(2)], [tk.rv() for _ in range(x.m_subtiles)]
        if steps >= x.promotion_unroll:
            self.promote_steps(s, u, part, rows, wg, x.promotion_unroll, lambda i: self.under(g, s, u, pair, i, wg))
            self.promote_remaining(s, u, part, rows, wg, steps - x.promotion_unroll)
        else:
            if pair.any:
                self.write_remaining(g, s, u, pair.before, wg)
            self.load_bias(g, u, pair.tile)
            for p in cutlass.range_constexpr(x.m_subtiles * x.split):
                self.begin(u, p)
            for _ in cutlass.range(steps, unroll=1):
                self.promote_steps(s, u, part, rows, wg, 1)

    @cute.jit
    def under(self, g, s: Constexpr, u: Constexpr, pair: Constexpr, i: Constexpr, wg):
        """What is done under part i of the first steps. The branch is for the first tile, and for the assembler:
        without it some of this comes between the part's wgmma, the last of which is issued 200 instructions late."""
        x = self.config
        if const_expr(i == 0):
            self.load_bias(g, u, pair.tile)
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

    def add_bias(self, u, part, first):
        """It is in the sums."""

    def write_subtiles(self, g, s, u, t, subtiles, wg):
        for i in subtiles:
            self.write_subtile(g, s, u, t, i, wg, None, None)

    @cute.jit
    def write_remaining(self, g, s: Constexpr, u: Constexpr, t, wg):
        self.write_subtiles(g, s, u, t, range(self.first_pending, self.first_pending + self.config.overlap_epilogue),
                            wg)
