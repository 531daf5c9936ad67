"""LayerNorm of several long rows at once, which wait for their cluster together. Its recipes' builder is here too."""
import operator

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int64

from ... import tile as tk
from ...utils import collect, elem_pointer, lanes_used, rsqrt, unpack_f32x2, warp_reduce
from .build import _arguments
from .layernorm import LayerNorm
from .row_norm import Options


def build(spec, config):
    """As `build.build`, for layernorm with several rows to a thread, a cluster to a row and every warp full."""
    arguments = _arguments(spec)
    if spec.plain:
        x, w, b, out, *_, eps, _ = arguments
        return LayerNormMultiRow(spec, config), (x, w, b, out, eps)
    return LayerNormMultiRowOptions(spec, config), arguments


class LayerNormMultiRow(LayerNorm):
    """Each row's parts are sent to the cluster's blocks before any row's are waited for:

      row 0   |sums|squares|send|                  |wait|join|
      row 1                      |sums|squares|send|         |wait|join|   then all rows' results

    So `statistics` returns what has to be waited for, and `_joined` waits. Every warp has as many elements of a row."""

    def statistics(self, row, eps, first):
        super().statistics(row, eps, first)
        return row, eps

    def _join(self, moments, row):
        for (mean, squares), buffer, mbar_ptr in zip(moments, row.buffers, row.mbar_ptrs):
            _send(mean, squares, buffer, tk.Semaphore(mbar_ptr))
        return moments

    def _joined(self, statistics):
        seen = 2 if self.spec.rounded else 1
        return [[self._of(buffer, mbar_ptr, eps) for buffer, mbar_ptr in list(zip(row.buffers, row.mbar_ptrs))[:seen]]
                for row, eps in statistics]

    def _of(self, buffer, mbar_ptr, eps):
        """(mean, rstd) of a row, as `LayerNorm` has them."""
        tk.wait(tk.Semaphore(mbar_ptr), 0)
        pairs = collect(buffer, Int64(0))
        means, squares = zip(*[unpack_f32x2(pairs[i]) for i in range(cute.size(pairs))])
        slots = cute.size(buffer, mode=[1])
        lanes, count = lanes_used(slots), self.N // slots
        about = cute.arch.shuffle_sync(means[0], 0)  # one warp's mean, so that a mean far from 0 costs no digits
        mean = about + warp_reduce(sum(m - about for m in means), operator.add, lanes) * (1.0 / slots)
        spread = sum(s + (m - mean) * (m - mean) * Float32(count) for m, s in zip(means, squares, strict=True))
        return mean, rsqrt(warp_reduce(spread, operator.add, lanes) * (1.0 / self.N) + eps)


class LayerNormMultiRowOptions(Options, LayerNormMultiRow):
    pass


@cute.jit
def _send(mean: Float32, squares: Float32, buffer: cute.Tensor, sem: Constexpr):
    """A warp's pair to its slot in every block of the cluster: `utils.publish` up to its wait."""
    rows, (warps, blocks) = buffer.shape
    if tk.warp_id() == 0:
        tk.expect_bytes(sem, rows * warps * blocks * 8)
    if tk.lane_id() < blocks:
        slot = elem_pointer(buffer, (tk.warp_id() // warps, (tk.warp_id() % warps, cute.arch.block_idx_in_cluster())))
        tk.store_remote(cute.recast_ptr(slot, dtype=Float32), (mean, squares), sem, tk.lane_id())
