"""The consumers of the float8 GEMM with an overlapped epilogue: a tile is stored while the next tile's first products
run."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

from ... import tile as tk
from ..epilogue import registers as ep
from .matrices import load_row_scales
from .state import State


@dataclass(frozen=True)
class PendingTile:
    """A consumer's registers beside its sums."""

    subtiles: list  # of a finished tile, in 16 bits
    cols: Any  # scales of b's columns, a part in each lane; None where there are none


class OverlappedConsumer:
    """A consumer of sums of all of K:

      time      ->
      consumer    |k0 .. kn|finish|k0 + store 0|k1 + store 1|k2 + store 2|k3 + store 3|k4 .. kn|finish|

    finish scales the sums, adds the bias, and rounds them, in registers. An activation is computed with its subtile, or
    a half of it under each of two steps: the product is rounded before and after it, as where both are calls of their
    own. The other consumer, ``stagger_stages`` stages apart, multiplies.

    Of groups it has two orders, each with its own cursor in their table: of the tile that it multiplies, and of the one
    before, which it writes. A tile of a group none of whose rows are this consumer's is only let go by.
    """

    def __init__(self, mainloop, epilogue, stagger):
        """Of a ``Mainloop``, an ``Epilogue`` and a ``Stagger``."""
        self.mainloop, self.epilogue, self.stagger = mainloop, epilogue, stagger
        self.spec, self.config, self.tiles, self.operands = (epilogue.spec, epilogue.config, epilogue.tiles,
                                                             epilogue.operands)

    def state(self, s) -> State:
        return State.of(self.spec, self.config, s.pipe)

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        order, last = self.operands.order(g, s), self.operands.order(g, s)
        u, pending = self.state(s), self.pending()
        first = order.first()
        number = first
        self.stagger.wait(g, s, order, number, wg)
        while number < order.tasks:
            self.one_tile(g, s, u, pending, self.operands.tile(g, s, order, number), last, number, wg)
            number = order.following(number)
        if number > first:  # there was a tile
            self.write_pending(g, s, pending, self.operands.tile(g, s, last, number - last.workers()), wg)
        tk.store_wait()

    @cute.jit
    def one_tile(self, g, s: Constexpr, u: Constexpr, pending: Constexpr, t, last, number, wg):
        """last: the order for the tile before."""
        if const_expr(self.operands.always_rows):
            self.sum_over(g, s, u, pending, t, last, number, wg)
        else:
            if self.operands.has_rows(t, wg):
                self.sum_over(g, s, u, pending, t, last, number, wg)
            else:
                if number >= last.workers():
                    self.write_pending(g, s, pending, self.operands.tile(g, s, last, number - last.workers()), wg)
                self.mainloop.let_go(g, s, u, t)

    @cute.jit
    def sum_over(self, g, s: Constexpr, u: Constexpr, pending: Constexpr, t, last, number, wg):
        self.mainloop.multiply(s, u, self.operands.mm, wg)
        first = self.write_under(g, s, u, pending, t, last, number, wg)
        if const_expr(self.spec.scale_b == "row"):
            load_row_scales(self.operands, g, u, t, wg)
            ep.load_lane_cols(pending.cols, self.operands.column_scales(g, t), t.col * self.config.n)
        self.epilogue.load_bias(g, u, t)
        for _ in cutlass.range(first, self.operands.steps(g, t), unroll=1):
            self.mainloop.next_step(s, u, wg)
        tk.mma_wait(0)
        self.mainloop.release(s, u)
        self.finish(g, u, pending)

    def pending(self) -> PendingTile:
        x, spec = self.config, self.spec
        cols = ep.lane_cols(x.n, Float32) if spec.scale_b == "row" else None
        count = x.m_subtiles * x.n // self.tiles.store_n
        return PendingTile([tk.rt(self.tiles.store_n, self.epilogue.out) for _ in range(count)], cols)

    @cute.jit
    def write_under(self, g, s: Constexpr, u: Constexpr, pending: Constexpr, t, last, number, wg):
        """The tile before, a subtile or a half of one under each of this one's first steps of K, as far as it has as
        many. Returns the next step."""
        steps = self.operands.steps(g, t)
        before = self.operands.tile(g, s, last, cutlass.max(number - last.workers(), 0))
        pieces = self.config.overlap_epilogue if const_expr(self.spec.activation is not None) else 1
        for i in cutlass.range_constexpr(len(pending.subtiles)):
            for piece in cutlass.range_constexpr(pieces):
                if number >= last.workers():
                    self.activate(pending, i, piece, pieces)
                    if const_expr(piece == pieces - 1):
                        self.put(g, s, pending.subtiles[i], before, i, wg)
                if pieces * i + piece + 1 < steps:
                    self.mainloop.next_step(s, u, wg)
        return cutlass.min(pieces * len(pending.subtiles) + 1, steps)

    @cute.jit
    def write_pending(self, g, s: Constexpr, pending: Constexpr, t, wg):
        for i in cutlass.range_constexpr(len(pending.subtiles)):
            self.activate(pending, i, 0, 1)
            self.put(g, s, pending.subtiles[i], t, i, wg)

    def activate(self, pending, i, piece, pieces):
        """A piece of subtile i, where there is an activation, in its place: in registers of its own it would spill."""
        if self.spec.activation is not None:
            width = self.tiles.store_n // pieces
            part = tk.columns(pending.subtiles[i], piece * width, width)
            tk.apply_narrow(part, ep.activation(self.spec.activation, self.epilogue.out), part)

    def put(self, g, s, result, t, i, wg):
        x = self.config
        self.epilogue.send(g, s, result, t, self.epilogue.place(t, i, wg), wg,
                           (i % x.store_buffers, x.stores_in_flight(i, self.spec.out)))

    def finish(self, g, u, pending):
        factor = g.scale_a[0] * g.scale_b[0] if self.spec.scale_b == "tensor" else None
        each = self.config.n // self.tiles.store_n
        for i, subtile in enumerate(pending.subtiles):
            part = self.epilogue.subtile_of(u, i)
            if pending.cols is not None:
                cols = tk.cv(self.tiles.store_n)
                ep.gather(cols, pending.cols, i % each * self.tiles.store_n)
                tk.mul_outer(part, part, u.rows[i // each], cols)
            elif factor is not None:
                tk.mul(part, part, factor)
            self.epilogue.add_bias(u, part, i % each * self.tiles.store_n)
            tk.copy(subtile, part)
