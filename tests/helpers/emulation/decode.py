"""kv_append and merge_state on a CPU: their own `thread`, called for one thread after the other."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tests.helpers.emulation import finish
from tkq.attention.decode import append, merge

function = finish.function


class MergeStateOnCpu(merge.MergeState):
    @cute.jit
    def __call__(self, o_a: cute.Tensor, operands: merge.Operands):
        B, S, H, D = o_a.shape
        for unit in cutlass.range(B * S * H * (D // merge.VECTOR) + 1):
            self.thread(Int32(unit), o_a, operands)


class KvAppendOnCpu(append.KvAppend):
    @cute.jit
    def __call__(self, k: cute.Tensor, operands: append.Operands):
        for unit in cutlass.range(k.shape[0] * self.units(k, operands) + 1):
            self.thread(Int32(unit), k, operands)
