"""The float8 GEMM of a few rows whose scales change along K: a warp of their own fetches them."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr

from .. import tile as tk
from . import fp8
from .apart_config import ApartFp8Config
from .fp8_rolling import RollingFp8Gemm
from .fp8_spec import Fp8Spec


class Apart:
    """In front of an Fp8Gemm with scales of a step: warpgroup 0's warp 0 loads tiles, its warp 1 scales.

      warp 0  |A, B k0|A, B k1|A, B k2| ..           until all stages are full, nothing between two loads
      warp 1  |addresses, scales k0|addresses, scales k1| ..

    A stage is full when both have brought theirs; each waits by itself for it to be free. With few rows a kernel is as
    long as B takes to come, and what stands between the first loads is lost.
    """

    @cute.jit
    def roles(self, g):
        x = self.config
        if tk.warp_id() == 0:
            tk.prefetch(g.a, g.b)
        s = self.shared(g, tk.SharedAllocator())
        tk.init_block(s.pipe.init, x.cluster)
        if const_expr(x.pdl):  # as in Fp8Gemm
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tk.specialise(lambda: self.produce(g, s), lambda wg: self.consume(g, s, wg), x.consumers, (), 2)
        if const_expr(x.cluster > 1):
            tk.cluster_sync()

    @cute.jit
    def produce(self, g, s: Constexpr):
        if tk.warp_id() == 0:
            self.produce_tiles(g, s)
        else:
            self.produce_scales(g, s)

    @cute.jit
    def produce_tiles(self, g, s: Constexpr):
        order, r = self.order(g, s), s.pipe.ring()
        number = order.first()
        while number < order.tasks:
            t = self.tile(g, s, order, number)
            for k in cutlass.range(self.steps(g, t), unroll=1):
                sem = s.pipe.acquire(r)
                self.load_tiles(g, s, r.stage, t, k, sem)
                r.advance()
            number = order.following(number)

    @cute.jit
    def produce_scales(self, g, s: Constexpr):
        order, r = self.order(g, s), s.pipe.ring()
        number = order.first()
        while number < order.tasks:
            t = self.tile(g, s, order, number)
            for k in cutlass.range(self.steps(g, t), unroll=1):
                s.pipe.acquire_empty(r)
                self.load_scales(g, s.scales[None, r.stage], t, k)
                tk.copy_async_arrive(s.pipe.full[r.stage])
                r.advance()
            number = order.following(number)


class ApartFp8Gemm(Apart, fp8.Fp8Gemm):
    pass


class ApartRollingFp8Gemm(Apart, RollingFp8Gemm):
    pass


def build(spec: Fp8Spec, config: ApartFp8Config):
    """(kernel, fake arguments): as ``fp8.build``."""
    scales = (Int64(1), Int64(1), Int64(1))
    kernel = ApartRollingFp8Gemm if config.rolling else ApartFp8Gemm
    return kernel(spec, config), (*fp8.operands(spec), scales, scales, Int64(1), Int64(1), Int32(1))
