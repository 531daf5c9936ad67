"""How a row is normalised by the blocks that stay of `fp8_persistent`, and the builder of their recipes."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ... import tile as tk
from ...rows.persistent.elements import or_neutral
from ...rows.persistent.kernel import RowKernel
from ...rows.persistent.monoid import Exchange, Monoid, add
from ...rows.persistent.partition import put
from ...rows.persistent.spec import RowSpec, Stream
from ...tile.float8 import nan_max, scale_of
from ...utils import WARP, domain_offset_i64, rsqrt
from ..fp8_persistent_config import shape
from ..persistent_plan import SUMS
from ..spec import GROUP
from .build import _arguments
from .fp8_output import _max_of
from .layernorm_persistent import _join

# ---- Long rows of a norm, quantised, by blocks that stay, on RowKernel: they read weight and bias once, and not for
# every
# row. What is known of a row but how it is normalised, which `fp8_persistent` says.


# unlike `monoid.MAXIMUM` not below 0
SCALED = Exchange(Monoid(lambda a, b: (nan_max(a[0], b[0]),), (0.0,)), row="scaled")


class PersistentFp8Rows(RowKernel):
    """With one scale to a row. A row is exchanged twice, each time while its neighbours are worked on, and its results
    are computed twice from x, which waits in the ring:

      computing warps   tile t: statistics -> send | tile t - 1: wait, join -> amax -> send
                        tile t - 2: wait -> scale -> results, release the stage

    A thread's part of weight and bias stays in its registers from row to row. A residual comes through the ring beside
    x, and their sum is computed anew each time. A subclass has the first of its exchanges, of what `_statistics` finds,
    and RowKernel's `row` and `write`."""

    loads, vectors, parameters = ("x", "residual"), ("weight", "bias"), ("eps",)
    stores, results = (), ()  # float8 and scales are written here: no RowKernel else has them
    _writes_rows = True  # by `_write_row`, of no Stream

    def __init__(self, spec, plan):
        given, self.out = shape(spec), spec.out
        if spec.offset:
            self.parameters = ("eps", "offset")
        loads, vectors = (tuple(Stream(name, getattr(spec, name)) for name in names if getattr(spec, name))
                          for names in (self.loads, self.vectors))
        super().__init__(RowSpec(__name__, type(self).__qualname__, spec.N, loads, vectors=vectors,
                                 vector=given.vector, bulk=given.bulk, sums=given.sums), plan)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: Optional[cute.Tensor], mB: Optional[cute.Tensor], mO: cute.Tensor,
                 mR: Optional[cute.Tensor], mT: Optional[cute.Tensor], mRstd, mMean, mScale: cute.Tensor, eps: Float32,
                 offset: Optional[Float32], units: Int32, stream: cuda.CUstream):
        """mX, mR, mO, mT: (M, N). mScale: (M, 1), or (M, groups). units: the most clusters that run at once."""
        self._launch(_given(mX, mR), _given(mO, mT), _given(mW, mB), mScale, _given(eps, offset), units, stream)

    def _launch(self, loads, stores, vectors, scale, parameters, units, stream):
        super().__call__(loads, stores, vectors, None, (scale,), None, None, None, parameters, units, stream)

    def _vectors(self, c):
        """What is added to the weight is so once: it is the same for all rows."""
        held = super()._vectors(c)
        if "offset" in self.parameters:
            held["weight"].store(held["weight"].load() + c.g.parameters[1])
        return held

    def _elements(self, c, views, j):
        e = super()._elements(c, views, j)
        if self.has("residual"):
            e.x = e.x + e.residual
        return e

    def _accumulate(self, c, k, views, r, total):
        if k == 0:
            self._statistics(c, views, total)
        else:
            ys = (self.write(self._elements(c, views, j), r)["y"] for j in range(self.plan.chunks))
            total[0] = _max_of([self._largest(y, c.part.inside(j)) for j, y in enumerate(ys)])

    def _statistics(self, c, views, total):
        """The first exchange's element of the thread's part of a row, into `total`."""
        raise NotImplementedError(f"{type(self).__name__}._statistics")

    def scaled(self, amax, r):
        scale = scale_of(amax[0], self.out)
        return dict(scale=scale, inverse=cute.arch.rcp_approx(scale))

    def _write_row(self, c, views, row, r):
        _store_one(c.g.results[0], (row, 0), r.scale, (c.part.thread == 0) & (c.s.rank == 0))
        for j in range(self.plan.chunks):
            self._store(c, row, j, self._result(c, views, row, j, r) * r.inverse)

    def _result(self, c, views, row, j, r):
        """Vector j of the row's result, as fp32. The sum with the residual, where it is asked for, is written."""
        e = self._elements(c, views, j)
        for total in c.g.stores[1:]:
            self._put(c, total, row, j, e.x)
        return self.write(e, r)["y"]

    def _affine(self, y, e):
        y = y * e.weight if self.has("weight") else y
        return dict(y=y + e.bias if self.has("bias") else y)

    def _largest(self, y, inside):
        """Of one vector; NaN where there is one in it."""
        m = cute.math.abs(y).reduce(cute.ReductionOp.MAX, 0.0, 0)
        return m if inside is True else cutlass.select_(inside, m, Float32(0))

    def _store(self, c, row, j, y):
        self._put(c, c.g.stores[0], row, j, y)

    def _put(self, c, out, row, j, y):
        x = cute.make_rmem_tensor((self.plan.vector,), out.element_type)
        x.store(y.to(out.element_type))
        put(c.part.of_row(out, row)[None, j], x, c.part.inside(j), self.plan.streaming)


class PersistentFp8Groups(PersistentFp8Rows):
    """The same with a scale for each 128 columns, which lie in neighbouring lanes: there is one exchange, and results
    are computed once. Several vectors of a thread at a time, or each would wait for its shuffles."""

    def _write_row(self, c, views, row, r):
        together = 4 if self.plan.warps <= 8 else 2
        for first in range(0, self.plan.chunks, together):
            js = range(first, min(first + together, self.plan.chunks))
            ys = [self._result(c, views, row, j, r) for j in js]
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


def _given(*arguments):
    return tuple(a for a in arguments if a is not None) or None


@cute.jit
def _store_one(t: cute.Tensor, coord, value: Float32, mine):
    if mine:
        domain_offset_i64(coord, t)[0, 0] = value


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


class PersistentLayerNormFp8(_LayerNorm, PersistentFp8Rows):
    exchanges = (_MOMENTS, SCALED)


class PersistentLayerNormFp8Groups(_LayerNorm, PersistentFp8Groups):
    exchanges = (_MOMENTS,)


class PersistentRMSNormFp8(_RMSNorm, PersistentFp8Rows):
    exchanges = (_SQUARES, SCALED)


class PersistentRMSNormFp8Groups(_RMSNorm, PersistentFp8Groups):
    exchanges = (_SQUARES,)


_KINDS = {("layernorm", "row"): PersistentLayerNormFp8, ("layernorm", "1x128"): PersistentLayerNormFp8Groups,
          ("rmsnorm", "row"): PersistentRMSNormFp8, ("rmsnorm", "1x128"): PersistentRMSNormFp8Groups}
