"""The gradient of softmax and log-softmax, from the output: two reads, one write."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from .. import tile as tk
from ..rows.one_pass.arguments import matrix
from ..rows.one_pass.kernel import OnePassRows
from ..runtime.compile import fake
from ..utils import row_reduce
from .online import exp


class SoftmaxBackward:
    """dx = scale * y * (dy - sum(dy * y)), of log-softmax dx = scale * (dy - exp(y) * sum(dy)), row by row.

    Both rows lie in registers over the exchange of the sum.
    """

    def __init__(self, spec, config):
        self.spec, self.rows = spec, OnePassRows(spec, config)
        self.log = spec.log

    def fake_arguments(self):
        """Compiled for y, dy, dx: (M, N) with any row stride; and scale."""
        rows = fake.sym()
        return *(matrix(self.spec, rows) for _ in range(3)), Float32(0)

    @cute.jit
    def __call__(self, mY: cute.Tensor, mDY: cute.Tensor, mDX: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        """mY, mDY, mDX: (M, N)."""
        tv_layout = self.rows.layout()
        self.kernel(mY, mDY, mDX, scale, tv_layout).launch(**self.rows.launch_shape(mY.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mY: cute.Tensor, mDY: cute.Tensor, mDX: cute.Tensor, scale: Float32, tv_layout: cute.Layout):
        self.work(self.rows.here(tv_layout), mY, mDY, mDX, scale)

    def work(self, here, mY, mDY, mDX, scale):
        """One thread's."""
        rows = self.rows
        place = rows.place(here, mY)
        y, dy = rows.row(mY, place), rows.row(mDY, place)
        total = row_reduce(
            self.partial(y, dy), cute.ReductionOp.ADD, rows.tile.threads_per_row, y.buffer, y.mbar_ptr,
            hook_fn=tk.cluster_wait if rows.cluster_n > 1 else None)
        for j in range(rows.tile.blocks):
            if self.log:
                dx = dy.block(j) - exp(y.block(j)) * total
            else:
                dx = y.block(j) * (dy.block(j) - total)
            rows.store(mDX, place, j, rows.copies.packed(dx * scale, mDX))

    def partial(self, y, dy):
        """This thread's part of what is summed over the row."""
        total = None
        for j in range(self.rows.tile.blocks):
            part = dy.block(j) if self.log else dy.block(j) * y.block(j)
            part = self.rows.masked(part, y, j, 0.0) if self.rows.shifted else part  # else zeros lie outside
            total = part if total is None else total + part
        return total
