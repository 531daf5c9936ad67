"""Long float8 rows of a norm by a persistent kernel, on RowKernel: weight and bias are read once, not for every row.
Which rows: `fp8_persistent_plan`."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from ... import tile as tk
from ...rows.persistent.elements import RowElements
from ...rows.persistent.kernel import RowKernel
from ...rows.persistent.monoid import Exchange, Monoid, add
from ...rows.persistent.partition import put
from ...rows.persistent.spec import RowSpec, Stream
from ...tile.float8 import nan_max, scale_of
from ...utils import WARP, domain_offset_i64, rsqrt
from ..fp8_persistent_plan import shape
from ..spec import GROUP
from . import arguments
from .fp8_output import largest, largest_of
from .layernorm_persistent import MOMENTS, given, moments


class PersistentFp8(RowKernel):
    """Composed of two parts: norm, `LayerNorm` or `RMSNorm`, and scales, `RowScale` or `GroupScales`. With one scale to
    a row, a row is exchanged twice, each time while its neighbours are worked on, and its results are computed twice
    from x, which waits in the ring:

      computing warps   tile t: statistics -> send | tile t - 1: wait, join -> amax -> send
                        tile t - 2: wait -> scale -> results, release the stage

    With a scale for each 128 columns there is one exchange, and results are computed once. A thread's part of weight
    and bias stays in its registers from row to row. A residual comes through the ring beside x, and their sum is
    computed anew each time."""

    loads, vectors, parameters = ("x", "residual"), ("weight", "bias"), ("eps",)
    stores, results = (), ()  # float8 and scales are written here: no RowKernel else has them

    def __init__(self, spec, plan):
        s, self.norm_spec, self.out = shape(spec), spec, spec.out
        self.norm = LayerNorm() if spec.kind == "layernorm" else RMSNorm()
        self.scales = RowScale() if spec.scale == "row" else GroupScales()
        self.exchanges = (self.norm.exchange, *self.scales.exchanges)
        if spec.offset:
            self.parameters = ("eps", "offset")
        loads, vectors = (tuple(Stream(name, getattr(spec, name)) for name in names if getattr(spec, name))
                          for names in (self.loads, self.vectors))
        super().__init__(RowSpec(__name__, type(self).__qualname__, spec.N, loads, vectors=vectors, vector=s.vector,
                                 bulk=s.bulk, sums=s.sums), plan, Fp8Elements)

    def fake_arguments(self):
        """Compiled for what `arguments.with_options` has, and the number of clusters."""
        return (*arguments.with_options(self.norm_spec), Int32(0))

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: Optional[cute.Tensor], mB: Optional[cute.Tensor], mO: cute.Tensor,
                 mR: Optional[cute.Tensor], mT: Optional[cute.Tensor], mRstd, mMean, mScale: cute.Tensor, eps: Float32,
                 offset: Optional[Float32], units: Int32, stream: cuda.CUstream):
        """mX, mR, mO, mT: (M, N). mScale: (M, 1), or (M, groups). units: the most clusters that run at once."""
        self._launch(given(mX, mR), given(mO, mT), given(mW, mB), mScale, given(eps, offset), units, stream)

    def _launch(self, loads, stores, vectors, scale, parameters, units, stream):
        super().__call__(loads[0], loads[1:] or None, stores, vectors, None, (scale,), None, None, None, parameters,
                         units, stream)

    def row(self, sums, r):
        return self.norm.row(self.N, sums, r)

    def write(self, e, r):
        y = self.norm.normalise(e.x, r)
        y = y * e.weight if self.has("weight") else y
        return dict(y=y + e.bias if self.has("bias") else y)

    def scaled(self, amax, r):
        scale = scale_of(amax[0], self.out)
        return dict(scale=scale, inverse=cute.arch.rcp_approx(scale))


class Fp8Elements(RowElements):
    """What a PersistentFp8 does with a row once it is there."""

    writes_rows = True  # by the scales' `write_row`, of no Stream

    def vectors(self, c):
        """What is added to the weight is so once: it is the same for all rows."""
        held = super().vectors(c)
        if "offset" in self.kernel.parameters:
            held["weight"].store(held["weight"].load() + c.g.parameters[1])
        return held

    def chunk(self, c, views, j):
        e = super().chunk(c, views, j)
        if self.kernel.has("residual"):
            e.x = e.x + e.residual
        return e

    def accumulate(self, c, k, views, r, total):
        if k == 0:
            for i, value in enumerate(self.kernel.norm.statistics(self, c, views)):
                total[i] = value
        else:
            ys = (self.kernel.write(self.chunk(c, views, j), r)["y"] for j in range(self.plan.chunks))
            total[0] = largest_of([largest(y, c.part.inside(j)) for j, y in enumerate(ys)])

    def write_row(self, c, views, row, r):
        self.kernel.scales.write_row(self, c, views, row, r)

    # ---- for the scales ---------------------------------------------------------------------------------

    def result(self, c, views, row, j, r):
        """Vector j of the row's result, as fp32. The sum with the residual, where it is asked for, is written."""
        e = self.chunk(c, views, j)
        for total in c.g.stores[1:]:
            self._put(c, total, row, j, e.x)
        return self.kernel.write(e, r)["y"]

    def store(self, c, row, j, y):
        self._put(c, c.g.stores[0], row, j, y)

    def _put(self, c, out, row, j, y):
        x = cute.make_rmem_tensor((self.plan.vector,), out.element_type)
        x.store(y.to(out.element_type))
        put(c.part.of_row(out, row)[None, j], x, c.part.inside(j), self.plan.streaming)


# ---- the scales of a row


class RowScale:
    """One to a row."""

    # unlike `monoid.MAXIMUM` not below 0
    exchanges = (Exchange(Monoid(lambda a, b: (nan_max(a[0], b[0]),), (0.0,)), row="scaled"),)

    def write_row(self, elements, c, views, row, r):
        _store_one(c.g.results[0], (row, 0), r.scale, (c.part.thread == 0) & (c.s.rank == 0))
        for j in range(elements.plan.chunks):
            elements.store(c, row, j, elements.result(c, views, row, j, r) * r.inverse)


class GroupScales:
    """One for each 128 columns, which lie in neighbouring lanes. Several vectors of a thread at a time, or each would
    wait for its shuffles."""

    exchanges = ()

    def write_row(self, elements, c, views, row, r):
        together = 4 if elements.plan.warps <= 8 else 2
        for first in range(0, elements.plan.chunks, together):
            js = range(first, min(first + together, elements.plan.chunks))
            ys = [elements.result(c, views, row, j, r) for j in js]
            amax = [largest(y, c.part.inside(j)) for y, j in zip(ys, js, strict=True)]
            for j, y, m in zip(js, ys, self._of_groups(elements.plan, amax), strict=True):
                scale = scale_of(m, elements.kernel.out)
                self._store_scale(elements.plan, c, row, j, scale)
                elements.store(c, row, j, y * cute.arch.rcp_approx(scale))

    def _of_groups(self, plan, amax):
        """Each over the lanes that have its 128 columns."""
        lanes, offset = min(WARP, GROUP // plan.vector), 1
        while offset < lanes:
            amax = [nan_max(m, cute.arch.shuffle_sync_bfly(m, offset=offset)) for m in amax]
            offset *= 2
        return amax

    def _store_scale(self, p, c, row, j, scale):
        inside = c.part.inside(j)
        first = tk.lane_id() % (GROUP // p.vector) == 0
        column = c.s.col0 + (j * p.threads_per_row + c.part.thread) * p.vector
        _store_one(c.g.results[0], (row, column // GROUP), scale, first if inside is True else first & inside)


@cute.jit
def _store_one(t: cute.Tensor, coord, value: Float32, mine):
    if mine:
        domain_offset_i64(coord, t)[0, 0] = value


# ---- the norm of a row


class LayerNorm:
    exchange = MOMENTS

    def statistics(self, elements, c, views):
        return moments(elements, c, views, exact=True)

    def row(self, N, sums, r):
        return dict(mean=sums[1], rstd=rsqrt(sums[2] * (1.0 / N) + r.eps))

    def normalise(self, x, r):
        return (x - r.mean) * r.rstd


class RMSNorm:
    exchange = Exchange(add(1))

    def statistics(self, elements, c, views):
        squares = None
        for j in range(elements.plan.chunks):
            x = elements.chunk(c, views, j).x  # 0 past the row's end
            squares = x * x if squares is None else squares + x * x
        return (squares.reduce(cute.ReductionOp.ADD, 0.0, 0),)

    def row(self, N, sums, r):
        return dict(rstd=rsqrt(sums[0] * (1.0 / N) + r.eps))

    def normalise(self, x, r):
        return x * r.rstd
