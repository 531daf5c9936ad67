"""How a row is normalised by the blocks that stay of `quant_kept_rows`, and the builder of their recipes."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..rows.elements import or_neutral
from ..rows.monoid import Exchange, Monoid, add
from ..utils import rsqrt
from .build import _arguments
from .kept import _join
from .kept_plan import SUMS
from .quant_kept_rows import SCALED, KeptBlocks, KeptRows

_MOMENTS, _SQUARES = Exchange(Monoid(_join, (0.0,) * SUMS, symmetric=False)), Exchange(add(1))


def build(spec, plan):
    """(kernel, fake arguments), as `build.build` has them, and the number of clusters last."""
    return _KINDS[spec.kind, spec.scale](spec, plan), (*_arguments(spec), Int32(0))


class _LayerNorm:
    """(count, mean, sum of squares about it) of the parts of a row, each centred on its own mean before it squares."""

    def _statistics(self, c, views, total):
        """A row of one number has that number as its mean: a scale shows what else would be left of it."""
        vector, chunks = Float32(self.plan.vector), [(j, c.part.inside(j)) for j in range(self.plan.chunks)]
        count = sum(vector if i is True else cutlass.select_(i, vector, Float32(0)) for _, i in chunks)
        inverse = cute.arch.rcp_approx(cutlass.max(count, Float32(1)))
        added = sum(self._elements(c, views, j).x for j, _ in chunks).reduce(cute.ReductionOp.ADD, 0.0, 0)
        mean = added * inverse
        mean = mean + (added - mean * count) * inverse
        cute.arch.sync_warp()  # or the compiler keeps the first pass's values
        squares = None
        for j, inside in chunks:
            d = or_neutral(self._elements(c, views, j).x - mean, inside, 0.0)
            squares = d * d if squares is None else squares + d * d
        total[0], total[1] = count, mean
        total[2] = squares.reduce(cute.ReductionOp.ADD, 0.0, 0)

    def row(self, sums, r):
        return dict(mean=sums[1], rstd=rsqrt(sums[2] * (1.0 / self.N) + r.eps))

    def write(self, e, r):
        return self._affine((e.x - r.mean) * r.rstd, e)


class _RMSNorm:
    def _statistics(self, c, views, total):
        squares = None
        for j in range(self.plan.chunks):
            x = self._elements(c, views, j).x  # 0 past the row's end
            squares = x * x if squares is None else squares + x * x
        total[0] = squares.reduce(cute.ReductionOp.ADD, 0.0, 0)

    def row(self, sums, r):
        return dict(rstd=rsqrt(sums[0] * (1.0 / self.N) + r.eps))

    def write(self, e, r):
        return self._affine(e.x * r.rstd, e)


class KeptLayerNormQuantised(_LayerNorm, KeptRows):
    exchanges = (_MOMENTS, SCALED)


class KeptLayerNormQuantisedBlocks(_LayerNorm, KeptBlocks):
    exchanges = (_MOMENTS,)


class KeptRMSNormQuantised(_RMSNorm, KeptRows):
    exchanges = (_SQUARES, SCALED)


class KeptRMSNormQuantisedBlocks(_RMSNorm, KeptBlocks):
    exchanges = (_SQUARES,)


_KINDS = {("layernorm", "row"): KeptLayerNormQuantised, ("layernorm", "block"): KeptLayerNormQuantisedBlocks,
          ("rmsnorm", "row"): KeptRMSNormQuantised, ("rmsnorm", "block"): KeptRMSNormQuantisedBlocks}
