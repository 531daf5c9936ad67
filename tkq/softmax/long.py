"""Softmax and log-softmax of the longest rows: blocks that stay, and go from row to row."""
import functools

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..row_kernel import RowKernel
from ..rows.elements import or_neutral
from ..rows.monoid import Exchange, Monoid
from ..rows.spec import RowSpec, Stream
from .online import INF, exp, finite, larger, log, reciprocal
from .plan import shape
from .spec import SoftmaxSpec


def _join(a, b):
    """(largest value, sum of exponentials below it) of two parts of a row."""
    top = larger(a[0], b[0])
    below = finite(top)
    return top, a[1] * exp(a[0] - below) + b[1] * exp(b[0] - below)


class LongSoftmax(RowKernel):
    """What `forward.Softmax` computes, as a RowKernel: a cluster's blocks copy the next rows to shared memory while the
    exchange and the stores of this one are under way, and few rows are read at a time.

    Before the exchange a thread takes the largest of all its values, then their exponentials below that: joined vector
    by vector, as a RowKernel's elements are, they would cost two exponentials more a vector.
    """

    loads, stores, parameters = ("x",), ("y",), ("scale",)
    exchanges = (Exchange(Monoid(_join, (-INF, 0.0), symmetric=False)),)

    def __init__(self, spec: SoftmaxSpec, plan):
        given = shape(spec)
        super().__init__(RowSpec(__name__, "LongSoftmax", spec.N, (Stream("x", spec.x),), (Stream("y", spec.x),),
                                 vector=given.vector, bulk=given.bulk, sums=given.sums), plan)
        self.log = spec.log

    @cute.jit
    def __call__(self, mX: cute.Tensor, mO: cute.Tensor, scale: Float32, units: Int32, stream: cuda.CUstream):
        """mX, mO: (M, N). units: the most clusters that run at once."""
        super().__call__((mX,), (mO,), None, None, None, None, None, None, (scale,), units, stream)

    def _accumulate(self, c, k, views, r, total):
        values = [or_neutral(self._elements(c, views, j).x * r.scale, c.part.inside(j), -INF)
                  for j in range(self.plan.chunks)]
        top = functools.reduce(larger, [x.reduce(cute.ReductionOp.MAX, -INF, 0) for x in values])
        below = finite(top)
        exponentials = [exp(x - below) for x in values]
        total[0] = top
        total[1] = sum(exponentials[1:], exponentials[0]).reduce(cute.ReductionOp.ADD, 0.0, 0)

    def row(self, sums, r):
        top, total = sums
        return dict(top=top, rest=log(total)) if self.log else dict(top=top, inverse=reciprocal(total))

    def write(self, e, r):
        below = e.x * r.scale - r.top
        return dict(y=below - r.rest if self.log else exp(below) * r.inverse)
