"""The scans' kernels on a CPU: their own `thread`, called for one thread after the other, as a warp which has all
runs."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tests.helpers.emulation import finish
from tkq.recurrence import columns, lines
from tkq.recurrence.config import WARP
from tkq.tile import assembly


class ColumnScanOnCpu(columns.ColumnScan):
    lanes = 1

    @cute.jit
    def __call__(self, a, operands: columns.Operands, way: Int32):
        g, (B, _, C) = columns.Given(a, *operands, way), a.shape
        for block in cutlass.range(B * C // self.spec.vector):
            self.thread(Int32(block), Int32(0), Int32(0), None, g)


class LineScanOnCpu(lines.LineScan):
    """Of a config with one lane a line: lanes have nothing to exchange, and are taken one after the other."""

    @cute.jit
    def __call__(self, a, operands: columns.Operands, way: Int32):
        g, (B, _, C) = columns.Given(a, *operands, way), a.shape
        for block in cutlass.range(cute.ceil_div(B * cute.ceil_div(C, WARP), self.config.line_groups)):
            for lane in cutlass.range(WARP):
                self.thread(Int32(block), Int32(0), Int32(lane), None, g)


def function(kernel, monkeypatch):
    """The compiled kernel, of one of this file's classes; takes tensors of the CPU."""
    with monkeypatch.context() as patched:
        patched.setattr(assembly, "product_toward_zero", lambda a, b: a * b)
        patched.setattr(assembly, "fma_toward_zero", lambda a, b, c: a * b + c)
        return finish.function(kernel, patched)
