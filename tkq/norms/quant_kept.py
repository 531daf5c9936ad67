"""LayerNorm of long rows, quantised, by blocks that stay, on RowKernel: they read weight and bias once, and not for
every row. The builder of its recipes is here too."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import tile as tk
from ..row_kernel import RowKernel
from ..rows.elements import or_neutral
from ..rows.monoid import Exchange, Monoid
from ..rows.share import put
from ..rows.spec import RowSpec, Stream
from ..utils import WARP, domain_offset_i64
from .build import _arguments
from .kept import KeptLayerNorm, _given
from .quant import _max_of, nan_max, scale_of
from .quant_kept_config import shape
from .spec import GROUP

# unlike `monoid.MAXIMUM` not below 0
_SCALED = Exchange(Monoid(lambda a, b: (nan_max(a[0], b[0]),), (0.0,)), row="scaled")


def build(spec, plan):
    """(kernel, fake arguments), as `build.build` has them, and the number of clusters last."""
    kind = KeptLayerNormQuantised if spec.scale == "row" else KeptLayerNormQuantisedBlocks
    return kind(spec, plan), (*_arguments(spec), Int32(0))


class KeptLayerNormQuantised(KeptLayerNorm):
    """What `quant.Quantised` computes of a layernorm, with one scale to a row. A row is exchanged twice, each time
    while its neighbours are worked on, and its results are computed twice from x, which waits in the ring:

      computing warps   tile t: mean, squares -> send | tile t - 1: wait, join -> amax -> send
                        tile t - 2: wait -> scale -> results, release the stage

    A thread's part of weight and bias stays in its registers from row to row."""

    stores, results = (), ()  # float8 and scales are written here: no RowKernel else has them
    exchanges = (*KeptLayerNorm.exchanges, _SCALED)

    def __init__(self, spec, plan):
        given, self.out = shape(spec), spec.out
        vectors = tuple(Stream(name, dtype) for name, dtype in (("weight", spec.weight), ("bias", spec.bias)) if dtype)
        RowKernel.__init__(self, RowSpec(__name__, type(self).__qualname__, spec.N, (Stream("x", spec.x),),
                                         vectors=vectors, vector=given.vector, bulk=given.bulk, sums=given.sums), plan)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW, mB, mO: cute.Tensor, mR, mT, mRstd, mMean, mScale: cute.Tensor,
                 eps: Float32, offset, units: Int32, stream: cuda.CUstream):
        """mX, mO: (M, N). mScale: (M, 1), or (M, groups). units: the most clusters that run at once."""
        self._launch(mX, mO, _given(mW, mB), (mScale,), eps, units, stream)

    def _accumulate(self, c, k, views, r, total):
        if k == 0:
            self._centred(c, views, total)
        else:
            total[0] = _max_of([self._largest(self._result(c, views, j, r), c.part.inside(j))
                                for j in range(self.plan.chunks)])

    def _centred(self, c, views, total):
        """(count, mean, sum of squares about it) of the thread's part of a row. A row of one number has that number as
        its mean: a scale shows what else would be left of it."""
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

    def scaled(self, amax, r):
        scale = scale_of(amax[0], self.out)
        return dict(scale=scale, inverse=cute.arch.rcp_approx(scale))

    def _write_row(self, c, views, row, r):
        _store_one(c.g.results[0], (row, 0), r.scale, (c.part.thread == 0) & (c.s.rank == 0))
        for j in range(self.plan.chunks):
            self._store(c, row, j, self._result(c, views, j, r) * r.inverse)

    def _result(self, c, views, j, r):
        """Vector j of the row's result, as fp32."""
        return self.write(self._elements(c, views, j), r)["y"]

    def _largest(self, y, inside):
        """Of one vector; NaN where there is one in it."""
        m = cute.math.abs(y).reduce(cute.ReductionOp.MAX, 0.0, 0)
        return m if inside is True else cutlass.select_(inside, m, Float32(0))

    def _store(self, c, row, j, y):
        out = c.g.stores[0]
        x = cute.make_rmem_tensor((self.plan.vector,), out.element_type)
        x.store(y.to(out.element_type))
        put(c.part.of_row(out, row)[None, j], x, c.part.inside(j), self.plan.streaming)


class KeptLayerNormQuantisedBlocks(KeptLayerNormQuantised):
    """The same with a scale for each 128 columns, which lie in neighbouring lanes: there is one exchange, and results
    are computed once. Several vectors of a thread at a time, or each would wait for its shuffles."""

    exchanges = KeptLayerNorm.exchanges

    def _write_row(self, c, views, row, r):
        together = 4 if self.plan.warps <= 8 else 2
        for first in range(0, self.plan.chunks, together):
            js = range(first, min(first + together, self.plan.chunks))
            ys = [self._result(c, views, j, r) for j in js]
            amax = [self._largest(y, c.part.inside(j)) for y, j in zip(ys, js, strict=True)]
            for j, y, m in zip(js, ys, self._of_groups(amax), strict=True):
                scale = scale_of(m, self.out)
                self._store_scale(c, row, j, scale)
                self._store(c, row, j, y * cute.arch.rcp_approx(scale))

    def _of_groups(self, amax):
        """Each over the lanes that have its 128 columns."""
        lanes, offset = min(WARP, GROUP // self.plan.vector), 1
        while offset < lanes:
            amax = [nan_max(m, cute.arch.shuffle_sync_bfly(m, offset=offset)) for m in amax]
            offset *= 2
        return amax

    def _store_scale(self, c, row, j, scale):
        p, inside = self.plan, c.part.inside(j)
        first = tk.lane_id() % (GROUP // p.vector) == 0
        column = c.s.col0 + (j * p.threads_per_row + c.part.thread) * p.vector
        _store_one(c.g.results[0], (row, column // GROUP), scale, first if inside is True else first & inside)


@cute.jit
def _store_one(t: cute.Tensor, coord, value: Float32, mine):
    if mine:
        domain_offset_i64(coord, t)[0, 0] = value
