"""Softmax and log-softmax of rows that stay on the chip: one read, one write."""
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int64

from .. import tile as tk
from ..rows.one_pass.arguments import matrix
from ..rows.one_pass.kernel import OnePassRows, Row
from ..runtime.compile import fake
from .online import OnlineRow, exp, finite, log, reciprocal


class Softmax:
    """exp(scale * x - max) / sum, or its logarithm, row by row.

    The row lies in registers, as the exponentials below the warp's own largest value, or in shared memory, from where
    they are computed a second time: see RowConfig.load. Copies to shared memory go through L1: (4096, 262144) in bf16
    on an H100 has 3020 GB/s, past it 2905.
    """

    def __init__(self, spec, config):
        self.spec, self.rows = spec, OnePassRows(spec, config, reduction_dtype=Int64)
        self.online = OnlineRow(self.rows, self.value)
        self.log = spec.log
        self.holds = config.load == "registers"

    def fake_arguments(self):
        """Compiled for x, out: (M, N) with any row stride; and scale."""
        rows = fake.sym()
        return matrix(self.spec, rows), matrix(self.spec, rows), Float32(0)

    def value(self, x, scale):
        return x * scale

    @cute.jit
    def __call__(self, mX: cute.Tensor, mO: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        """mX, mO: (M, N)."""
        tv_layout = self.rows.layout()
        self.kernel(mX, mO, scale, tv_layout).launch(**self.rows.launch_shape(mX.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mO: cute.Tensor, scale: Float32, tv_layout: cute.Layout):
        self.work(self.rows.here(tv_layout), mX, mO, scale)

    def work(self, here, mX, mO, scale):
        """One thread's."""
        rows, copies = self.rows, self.rows.copies
        place = rows.place(here, mX)
        row = rows.row(mX, place)
        rows.landed()
        result = self.normaliser(row, scale)
        packed = [copies.packed(result(j), mO) for j in range(rows.tile.blocks)]
        copies.forget()  # or the compiler moves each store up to where its result is computed
        for j in range(rows.tile.blocks):
            rows.store(mO, place, j, packed[j])

    def normaliser(self, row: Row, scale):
        """The function from j to vector j of the result."""
        online, forget = self.online, self.rows.copies.forget
        mine = online.top(row, scale)
        forget()
        below = finite(mine)
        exponentials = online.exponentials(row, scale, below)
        total = online.total(exponentials)
        if self.rows.cluster_n > 1:
            tk.cluster_wait()
        top, total = online.join(mine, total, row)
        forget()
        if self.log:
            rest = log(total)
            return lambda j: online.values(row, j, scale) - top - rest
        if self.holds:
            factor = exp(mine - top) * reciprocal(total)
            return lambda j: exponentials[j] * factor
        inverse = reciprocal(total)
        return lambda j: exp(online.values(row, j, scale) - top) * inverse
