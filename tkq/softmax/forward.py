"""Softmax and log-softmax of rows that stay on the chip: one read, one write."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from .. import tile as tk
from ..rows.one_pass.kernel import Row
from .online import OnlineRow, exp, finite, log, reciprocal


class Softmax(OnlineRow):
    """exp(scale * x - max) / sum, or its logarithm, row by row.

    The row lies in registers, as the exponentials below the warp's own largest value, or in shared memory, from where
    they are computed a second time: see RowConfig.load.
    """

    def __init__(self, spec, config):
        super().__init__(tk.element_type(spec.x), spec.N, spec.vector, config, shifted=spec.shifted)
        self.log = spec.log
        self.holds = config.load == "registers"

    def value(self, x, scale):
        return x * scale

    @cute.jit
    def __call__(self, mX: cute.Tensor, mO: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        """mX, mO: (M, N)."""
        tv_layout = self._layout()
        self.kernel(mX, mO, scale, tv_layout).launch(**self._launch_shape(mX.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mO: cute.Tensor, scale: Float32, tv_layout: cute.Layout):
        self.work(self._here(tv_layout), mX, mO, scale)

    def work(self, here, mX, mO, scale):
        """One thread's."""
        place = self._place(here, mX)
        row = self._row(mX, place)
        self._landed()
        result = self.normaliser(row, scale)
        packed = [self._packed(result(j), mO) for j in range(self.tile.blocks)]
        self._forget()  # or the compiler moves each store up to where its result is computed
        for j in range(self.tile.blocks):
            self._store(mO, place, j, packed[j])

    def normaliser(self, row: Row, scale):
        """The function from j to vector j of the result."""
        mine = self.top(row, scale)
        self._forget()
        below = finite(mine)
        exponentials = self.exponentials(row, scale, below)
        total = self.total(exponentials)
        if self.cluster_n > 1:
            tk.cluster_wait()
        top, total = self.join(mine, total, row)
        self._forget()
        if self.log:
            rest = log(total)
            return lambda j: self.values(row, j, scale) - top - rest
        if self.holds:
            factor = exp(mine - top) * reciprocal(total)
            return lambda j: exponentials[j] * factor
        inverse = reciprocal(total)
        return lambda j: exp(self.values(row, j, scale) - top) * inverse
