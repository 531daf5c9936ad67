"""Long rows of layernorm, quantised: with few enough registers for several blocks on a multiprocessor.

`quant.Quantised` holds a row's results in registers while amax is found. With layernorm's they come to 100 and 118
registers of 512 threads at 131072 and 262144 columns: one block is on a multiprocessor, which reads nothing while it
exchanges. Its recipes' builder is here too.
"""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ... import tile as tk
from ...rows.one_pass.copies import in_registers
from ...tile.float8 import nan_max, scale_of
from ...utils import collect, lanes_used, unpack_f32x2, warp_reduce, widened
from .build import _arguments
from .fp8_output import Fp8Output, _max_of
from .layernorm import LayerNorm
from .layernorm_multi_row import LayerNormMultiRow, _send
from .row_norm import Operands, Row


def build(spec, config):
    """As `build.build`, for a quantising layernorm with a cluster to a row."""
    kind = LayerNormFp8MinBlocksPerSm
    if config.load == "shared":
        kind = LayerNormFp8MultiRow if config.tile(spec).even(spec.N) else LayerNormFp8RecomputeOutput
    return kind(spec, config), _arguments(spec)


class LayerNormFp8MinBlocksPerSm(Fp8Output, LayerNorm):
    """`build.LayerNormFp8`, with registers for so many blocks on a multiprocessor."""

    @cute.jit
    def _launch(self, g: Operands, eps: Float32, offset: Optional[Float32], stream: cuda.CUstream):
        self._set_cluster_n()
        bits = self.spec.vector * self.dtype.width
        _, tv_layout = self._get_tv_layout(bits)
        self.tile = self._get_tile(bits)
        self.kernel(g, eps, offset, None, tv_layout).launch(
            grid=[cute.ceil_div(g.rows, self.config.rows_per_thread), self.cluster_n, 1],
            block=[self.tile.threads, 1, 1], cluster=[1, self.cluster_n, 1], stream=stream,
            min_blocks_per_mp=self.config.min_blocks_per_sm, preferred_smem_carveout=100)


class LayerNormFp8RecomputeOutput(LayerNormFp8MinBlocksPerSm):
    """One scale to a row. x waits in shared memory, and each result is computed twice: for amax, and to be stored. amax
    crosses the cluster in a message for every two rows of a thread:

      row 0   |sums|squares|exchange|                       |amax|send|wait|  results
      row 1                         |sums|squares|exchange| |amax|
    """

    def _finish(self, g, parts, mine, statistics, affine):
        amax = self._of_cluster(self._largest_of(g, parts, mine, statistics, affine), parts)
        self._forget()
        scales = [scale_of(m, self.spec.out) for m in amax]
        inverses = [cute.arch.rcp_approx(s) for s in scales]
        for place, scale in zip(mine.places, scales, strict=True):
            self._store_scalar(g.scale, place, scale, mine.col == 0, 0)
        for j in range(self.tile.blocks):
            affine_j = self._affine_of(g, affine, mine.inside, j)
            for r, part in enumerate(parts):
                y = self._result(part, j, statistics[r], affine_j[r])
                self._store(g.out, mine.places[r], mine, self._packed(y * inverses[r], g.out), j)

    def _row(self, *args):
        return LongRow(*super()._row(*args))

    def _vector(self, held, m, coord, inside, j):
        if held is None or m.element_type is not BFloat16:
            return super()._vector(held, m, coord, inside, j)
        return _widened_anew(held[None, j])

    def _largest_of(self, g, parts, mine, statistics, affine):
        """This thread's largest |result| of each row."""
        found = [[] for _ in parts]
        for j in range(self.tile.blocks):
            affine_j = self._affine_of(g, affine, mine.inside, j)
            for r, part in enumerate(parts):
                y = self._result(part, j, statistics[r], affine_j[r])
                found[r] = [_max_of([*found[r], self._largest(y, mine.inside[j])])]
        return [m for m, in found]

    def _of_cluster(self, amax, parts):
        """amax of each row, in all of its threads."""
        amax = [warp_reduce(m, nan_max) for m in amax]
        pairs = [(part, i) for i, part in enumerate(parts) if i % 2 == 0]
        for part, i in pairs:
            _send(amax[i], amax[min(i + 1, len(amax) - 1)], part.buffers[1], tk.Semaphore(part.mbar_ptrs[1]))
        found = [m for part, _ in pairs for m in _received(part)]
        return found[:len(amax)]


class LayerNormFp8MultiRow(LayerNormMultiRow, LayerNormFp8RecomputeOutput):
    """The same where every warp has as many elements of a row: the rows' statistics are waited for together, too."""


class LongRow(Row):
    """Its vectors take an instruction an element to be fp32, where `one_pass.copies.floats` takes one and a half: the
    passes over a row are four here."""

    def block(self, j):
        parts = [widened(in_registers(held[None, j])) for held in self.data]
        return parts[0] + parts[1] if len(parts) == 2 else parts[0]


def _received(part):
    """(amax, amax of the next row), of all warps."""
    tk.wait(tk.Semaphore(part.mbar_ptrs[1]), 0)
    values = collect(part.buffers[1], Int64(0))
    both = [unpack_f32x2(values[i]) for i in range(cute.size(values))]
    lanes = lanes_used(cute.size(part.buffers[1], mode=[1]))
    return [warp_reduce(_max_of(list(of_row)), nan_max, lanes) for of_row in zip(*both, strict=True)]


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
