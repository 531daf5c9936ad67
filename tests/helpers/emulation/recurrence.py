"""The scans' kernels on a CPU: their own `thread`, called for one thread after the other, as a warp of one lane which
has all runs. What is in shared memory is in registers then, and found element by element."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tests.helpers.emulation import finish
from tkq.recurrence import columns, lines


class ColumnScanOnCpu(columns.ColumnScan):
    lanes = 1

    @cute.jit
    def __call__(self, a, operands: columns.Operands, way: Int32):
        g, (B, _, C) = columns.Given(a, *operands, way), a.shape
        for block in cutlass.range(B * C // self.spec.vector):
            self.thread(Int32(block), Int32(0), Int32(0), None, g)


class LineScanOnCpu(lines.LineScan):
    lanes = 1

    @cute.jit
    def __call__(self, a, operands: columns.Operands, way: Int32):
        g, (B, _, C) = columns.Given(a, *operands, way), a.shape
        parts = cute.make_rmem_tensor(cute.make_layout((self.config.rows, 1, self.tensors)), self.dtype)
        for block in cutlass.range(B * C):
            self.thread(Int32(block), Int32(0), Int32(0), (None, parts), g)

    def from_shared(self, part, line, t, n):
        held = cute.make_rmem_tensor(n, self.dtype)
        for i in range(n):
            held[i] = part[t + i, line]
        return held

    def to_shared(self, held, part, line, t, n):
        for i in range(n):
            part[t + i, line] = held[i]


def function(kernel, monkeypatch):
    """The compiled kernel, of one of this file's classes; takes tensors of the CPU."""
    with monkeypatch.context() as patched:
        patched.setattr(cute.arch, "sync_warp", lambda: None)
        return finish.function(kernel, patched)
