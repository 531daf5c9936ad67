"""The kernel that transposes V of float8 attention, on a CPU: its own `thread`, called for one thread after another."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tests.helpers.emulation import finish
from tkq.attention.fp8 import transpose

function = finish.function


class TransposeValuesOnCpu(transpose.TransposeValues):
    @cute.jit
    def __call__(self, v: cute.Tensor, workspace: cute.Tensor):
        lanes = 1 if cutlass.const_expr(self.spec.keys_contiguous) else transpose.LANES
        for thread in cutlass.range(self.units(workspace) * lanes + 1):
            self.thread(Int32(thread), v, workspace)
