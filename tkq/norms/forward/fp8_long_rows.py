"""Long float8 rows of layernorm, whose results are computed twice: few registers, several blocks on a multiprocessor.

`Fp8Output` holds a row's results in registers while amax is found. With layernorm's they come to 100 and 118 registers
of 512 threads at 131072 and 262144 columns: one block is on a multiprocessor, which reads nothing while it exchanges.
"""
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ... import tile as tk
from ...rows.one_pass.copies import in_registers
from ...tile.float8 import nan_max, scale_of
from ...utils import collect, lanes_used, unpack_f32x2, warp_reduce, widened
from .fp8_output import largest, largest_of
from .layernorm_multi_row import send_pair
from .row_norm import Output, Row


class LongRow(Row):
    """Its vectors take an instruction an element to be fp32, where `one_pass.copies.floats` takes one and a half: the
    passes over a row are four here."""

    def block(self, j):
        parts = [widened(in_registers(held[None, j])) for held in self.data]
        return parts[0] + parts[1] if len(parts) == 2 else parts[0]


class RecomputeOutput(Output):
    """A part of `row_norm.RowNorm`, chosen by `config.recomputes_output`: one scale to a row. x waits in shared memory,
    and each result is computed twice: for amax, and to be stored. amax crosses the cluster in a message for every two
    rows of a thread:

      row 0   |sums|squares|exchange|                       |amax|send|wait|  results
      row 1                         |sums|squares|exchange| |amax|
    """

    row = LongRow

    def widened(self, x):
        return _widened_anew(x) if x.element_type is BFloat16 else super().widened(x)

    def finish(self, kernel, g, parts, mine, statistics, affine):
        amax = _of_cluster(self._largest_of(kernel, g, parts, mine, statistics, affine), parts)
        kernel.copies.forget()
        scales = [scale_of(m, kernel.spec.out) for m in amax]
        inverses = [cute.arch.rcp_approx(s) for s in scales]
        for place, scale in zip(mine.places, scales, strict=True):
            kernel.store_scalar(g.scale, place, scale, mine.col == 0, 0)
        for j in range(kernel.tile.blocks):
            affine_j = kernel.affine_of(g, affine, mine.inside, j)
            for r, part in enumerate(parts):
                y = kernel.result(part, j, statistics[r], affine_j[r])
                kernel.store(g.out, mine.places[r], mine, kernel.copies.packed(y * inverses[r], g.out), j)

    def _largest_of(self, kernel, g, parts, mine, statistics, affine):
        """This thread's largest |result| of each row."""
        found = [[] for _ in parts]
        for j in range(kernel.tile.blocks):
            affine_j = kernel.affine_of(g, affine, mine.inside, j)
            for r, part in enumerate(parts):
                y = kernel.result(part, j, statistics[r], affine_j[r])
                found[r] = [largest_of([*found[r], largest(y, mine.inside[j])])]
        return [m for m, in found]


def _of_cluster(amax, parts):
    """amax of each row, in all of its threads."""
    amax = [warp_reduce(m, nan_max) for m in amax]
    pairs = [(part, i) for i, part in enumerate(parts) if i % 2 == 0]
    for part, i in pairs:
        send_pair(amax[i], amax[min(i + 1, len(amax) - 1)], part.buffers[1], tk.Semaphore(part.mbar_ptrs[1]))
    found = [m for part, _ in pairs for m in _received(part)]
    return found[:len(amax)]


def _received(part):
    """(amax, amax of the next row), of all warps."""
    tk.wait(tk.Semaphore(part.mbar_ptrs[1]), 0)
    values = collect(part.buffers[1], Int64(0))
    both = [unpack_f32x2(values[i]) for i in range(cute.size(values))]
    lanes = lanes_used(cute.size(part.buffers[1], mode=[1]))
    return [warp_reduce(largest_of(list(of_row)), nan_max, lanes) for of_row in zip(*both, strict=True)]


def _widened_anew(x):
    """`utils.widened` of bf16, which the compiler does not do once for both passes: that would take a register for each
    element."""
    n = cute.size(x)
    words, wide = cute.recast_tensor(x, Uint32), cute.make_rmem_tensor(n, Float32)
    for i in range(n // 2):
        word = _same(words[i])
        wide[2 * i] = (word << 16).bitcast(Float32)
        wide[2 * i + 1] = (word & Uint32(0xFFFF0000)).bitcast(Float32)
    return wide.load()


@dsl_user_op
def _same(x: Uint32, *, loc=None, ip=None) -> Uint32:
    """x, as a number of which the compiler knows nothing."""
    return Uint32(llvm.inline_asm(T.i32(), [Uint32(x).ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=r,r",
                                  has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
                                  loc=loc, ip=ip))
