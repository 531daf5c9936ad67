"""Persistent norms for any row length, for bench/tune/short_norms.py. layernorm's is
tkq.norms.forward.layernorm_persistent."""
from tkq.rows.persistent.kernel import RowKernel
from tkq.utils import rsqrt


class PersistentRMSNorm(RowKernel):
    """rmsnorm, and with a residual the sum that it is of, too."""

    loads, stores, vectors, parameters = ("x", "residual"), ("y", "total"), ("weight",), ("eps",)

    def _sum(self, e):
        return e.x + e.residual if self.has("residual") else e.x

    def partial(self, e, r):
        h = self._sum(e)
        return (h * h,)

    def row(self, sums, r):
        return dict(rstd=rsqrt(sums[0] * (1.0 / self.N) + r.eps))

    def write(self, e, r):
        h = self._sum(e)
        y = dict(y=h * r.rstd * e.weight)
        return dict(**y, total=h) if self.has("residual") else y
