"""The gradient of softmax and log-softmax, from the output: two reads, one write."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from .. import tile as tk
from ..rows.one_pass.kernel import OnePassRows
from ..utils import row_reduce
from .online import exp


class SoftmaxBackward(OnePassRows):
    """dx = scale * y * (dy - sum(dy * y)), of log-softmax dx = scale * (dy - exp(y) * sum(dy)), row by row.

    Both rows lie in registers over the exchange of the sum.
    """

    def __init__(self, spec, config):
        super().__init__(tk.element_type(spec.x), spec.N, spec.vector, config, shifted=spec.shifted)
        self.log = spec.log

    @cute.jit
    def __call__(self, mY: cute.Tensor, mDY: cute.Tensor, mDX: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        """mY, mDY, mDX: (M, N)."""
        tv_layout = self._layout()
        self.kernel(mY, mDY, mDX, scale, tv_layout).launch(**self._launch_shape(mY.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mY: cute.Tensor, mDY: cute.Tensor, mDX: cute.Tensor, scale: Float32, tv_layout: cute.Layout):
        self.work(self._here(tv_layout), mY, mDY, mDX, scale)

    def work(self, here, mY, mDY, mDX, scale):
        """One thread's."""
        place = self._place(here, mY)
        y, dy = self._row(mY, place), self._row(mDY, place)
        total = row_reduce(
            self.partial(y, dy), cute.ReductionOp.ADD, self.tile.threads_per_row, y.buffer, y.mbar_ptr,
            hook_fn=tk.cluster_wait if self.cluster_n > 1 else None)
        for j in range(self.tile.blocks):
            if self.log:
                dx = dy.block(j) - exp(y.block(j)) * total
            else:
                dx = y.block(j) * (dy.block(j) - total)
            self._store(mDX, place, j, self._packed(dx * scale, mDX))

    def partial(self, y, dy):
        """This thread's part of what is summed over the row."""
        total = None
        for j in range(self.tile.blocks):
            part = dy.block(j) if self.log else dy.block(j) * y.block(j)
            part = self._masked(part, y, j, 0.0) if self.shifted else part  # else zeros lie outside
            total = part if total is None else total + part
        return total
