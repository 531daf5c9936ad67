"""The consumers of the float8 GEMM: warpgroups that sum up each tile, and write it. Which parts a config means."""
from dataclasses import replace

import cutlass.cute as cute
from cutlass import Constexpr, const_expr

from ... import tile as tk
from .config import Fp8Config, prefetches_bias
from .epilogue import Epilogue
from .mainloop import Mainloop
from .overlapped_epilogue import OverlappedConsumer
from .overlapped_promotion import OverlappedPromotionConsumer
from .promotion import PipelinedPromotion, Promotion
from .spec import Fp8Spec
from .state import State, Tiles


class Stagger:
    """How far the first consumer starts before the second."""

    def __init__(self, operands, stages: int):
        self.operands, self.stages = operands, stages

    @cute.jit
    def wait(self, g, s: Constexpr, order, number, wg):
        """The second consumer waits at the first tile, until the first one can have ``stagger_stages`` stages."""
        stagger_stages = self.stages
        if const_expr(stagger_stages > 0):
            if wg == 1 and number < order.tasks:
                if self.operands.steps(g, self.operands.tile(g, s, order, number)) > stagger_stages:
                    tk.wait(s.pipe.full[stagger_stages], 0)


class Consumer:
    """A tile's sums, then its epilogue, tile after tile:

      consumer    |k0 .. kn|store|k0 .. kn|store|
    """

    def __init__(self, mainloop, epilogue, stagger):
        """Of a ``Mainloop``, a ``Promotion`` or a ``PipelinedPromotion``; an ``Epilogue``; a ``Stagger``."""
        self.mainloop, self.epilogue, self.stagger = mainloop, epilogue, stagger
        self.config, self.operands = epilogue.config, epilogue.operands

    def state(self, s) -> State:
        u = State.of(self.epilogue.spec, self.config, s.pipe)
        return replace(u, edge=self.operands.edge())

    @cute.jit
    def consume(self, g, s: Constexpr, wg):
        order, u = self.operands.order(g, s), self.state(s)
        number = order.first()
        self.stagger.wait(g, s, order, number, wg)
        while number < order.tasks:
            t = self.operands.tile(g, s, order, number)
            if const_expr(prefetches_bias(self.config)):
                self.epilogue.load_bias(g, u, t)
            self.mainloop.sum(g, s, u, t, wg)
            self.epilogue.write(g, s, u, t, wg)
            number = order.following(number)
        tk.store_wait()


def consumer(spec: Fp8Spec, config: Fp8Config, tiles: Tiles, operands):
    """The consumer of a config, made of its parts."""
    x, mainloop, form = config, Mainloop, Consumer
    if x.promotion_unroll:
        mainloop, form = PipelinedPromotion, OverlappedPromotionConsumer if x.overlap_epilogue else Consumer
    elif spec.promote:
        mainloop = Promotion
    elif x.overlap_epilogue:
        form = OverlappedConsumer
    return form(mainloop(spec, x, operands), Epilogue(spec, x, tiles, operands), Stagger(operands, x.stagger_stages))
