"""The consumers of the 16-bit GEMM: warpgroups that multiply the stages, and finish and store each tile."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

from ... import tile as tk
from ..epilogue import registers as ep
from . import operands
from .config import Config
from .spec import GemmSpec
from .state import State, Tiles


class Consumer:
    """64 rows of a block's tile. ``epilogue``: how they become the result, see ``Epilogue``."""

    def __init__(self, spec: GemmSpec, config: Config, tiles: Tiles, matrices, epilogue):
        self.spec, self.config, self.tiles, self.matrices, self.epilogue = spec, config, tiles, matrices, epilogue
        self.mm, self.mma = operands.products(spec)

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        x, order, u = self.config, self.matrices.order(g, s), self.state(s)
        number = order.first()
        while number < order.tasks:
            t, first = self.matrices.tile(g, s, order, number), Int32(1)
            self.multiply(s, u, self.mm, wg)
            if const_expr(x.overlap_epilogue):
                first = self.write_overlapped(g, s, u, order, number, wg)
            elif const_expr(x.hold_in_registers):
                if number >= order.workers():  # not this block's first
                    self.epilogue.write(g, s, u, self.matrices.tile(g, s, order, number - order.workers()), wg)
            self.epilogue.fetch(g, u, t, wg)
            for _ in cutlass.range(first, g.steps, unroll=1):
                self.step(s, u, wg)
            tk.mma_wait(0)
            self.release(s, u)
            if const_expr(x.hold_in_registers):
                self.epilogue.finish(g, u, t, wg)
            else:
                self.epilogue.write(g, s, u, t, wg)
            number = order.following(number)
        if const_expr(x.hold_in_registers):
            self.epilogue.write(g, s, u, self.matrices.tile(g, s, order, number - order.workers()), wg)
        tk.store_wait()

    def state(self, s) -> State:
        x, tiles, e, pending, bias = self.config, self.tiles, self.spec.epilogue, [], None
        if x.hold_in_registers:
            pending = [tk.rt(tiles.store_n, tiles.out.dtype)
                       for _ in range(tiles.n_stores * (tiles.parts if x.defer_activation else 1))]
        if e.bias:
            bias = [ep.lane_cols(x.n // tiles.parts, tk.element_type(e.bias)) for _ in range(tiles.parts)]
        return State(tk.rt_fl(x.n), pending, bias, s.pipe.ring(), s.pipe.ring())

    # ---- products

    def multiply(self, s, u, product, wg):
        """Issue one step of K."""
        s.pipe.wait(u.full)
        product(u.acc, s.a[u.full.stage], s.b[u.full.stage], a_part=wg)
        u.full.advance()

    def release(self, s, u):
        s.pipe.release(u.done)
        u.done.advance()

    def step(self, s, u, wg):
        """Issue one K step and retire the previous one."""
        self.multiply(s, u, self.mma, wg)
        tk.mma_wait(1)
        self.release(s, u)

    # ---- the tile before, under this one's first steps

    @cute.jit
    def write_overlapped(self, g, s: Constexpr, u: Constexpr, order, number, wg):
        """The tile before, a subtile or a piece of one under each of this one's first steps of K, as far as it has as
        many. Returns the next step."""
        n_stores, workers = self.tiles.n_stores, order.workers()
        t = self.matrices.tile(g, s, order, number - workers)
        pieces = self.config.overlap_epilogue  # of a subtile
        for i in cutlass.range_constexpr(n_stores):
            for piece in cutlass.range_constexpr(pieces):
                if number >= workers:
                    if const_expr(pieces > 1):
                        self.epilogue.activate_piece(u, i, piece)
                        if const_expr(piece == pieces - 1):
                            self.epilogue.put(g, s, u.pending[i], t, i, wg)
                    else:
                        self.epilogue.write_subtile(g, s, u, t, i, wg)
                if pieces * i + piece + 1 < g.steps:
                    self.step(s, u, wg)
        return cutlass.min(pieces * n_stores + 1, g.steps)
