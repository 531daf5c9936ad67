"""LayerNorm of several long rows at once, which wait for their cluster together."""
import operator

import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int64

from ... import tile as tk
from ...utils import collect, elem_pointer, lanes_used, rsqrt, unpack_f32x2, warp_reduce
from .layernorm import LayerNorm


class LayerNormMultiRow(LayerNorm):
    """A part of `row_norm.RowNorm`, chosen by `config.waits_together`: several rows to a thread, a cluster to a row and
    every warp full. Each row's parts are sent to the cluster's blocks before any row's are waited for:

      row 0   |sums|squares|send|                  |wait|join|
      row 1                      |sums|squares|send|         |wait|join|   then all rows' results

    Every warp has as many elements of a row."""

    def statistics(self, kernel, rows, eps):
        sent = [self._send(self.moments(kernel, row, r == 0), row) for r, row in enumerate(rows)]
        return [[_arrived(buffer, mbar_ptr, kernel.N, eps) for buffer, mbar_ptr in of_row] for of_row in sent]

    def _send(self, moments, row):
        """The buffers and mbarriers to wait for."""
        places = list(zip(row.buffers, row.mbar_ptrs))[:len(moments)]
        for (mean, squares), (buffer, mbar_ptr) in zip(moments, places, strict=True):
            send_pair(mean, squares, buffer, tk.Semaphore(mbar_ptr))
        return places


def _arrived(buffer, mbar_ptr, N, eps):
    """(mean, rstd) of a row, as `LayerNorm` has them."""
    tk.wait(tk.Semaphore(mbar_ptr), 0)
    pairs = collect(buffer, Int64(0))
    means, squares = zip(*[unpack_f32x2(pairs[i]) for i in range(cute.size(pairs))])
    slots = cute.size(buffer, mode=[1])
    lanes, count = lanes_used(slots), N // slots
    about = cute.arch.shuffle_sync(means[0], 0)  # one warp's mean, so that a mean far from 0 costs no digits
    mean = about + warp_reduce(sum(m - about for m in means), operator.add, lanes) * (1.0 / slots)
    squares = sum(s + (m - mean) * (m - mean) * Float32(count) for m, s in zip(means, squares, strict=True))
    return mean, rsqrt(warp_reduce(squares, operator.add, lanes) * (1.0 / N) + eps)


@cute.jit
def send_pair(mean: Float32, squares: Float32, buffer: cute.Tensor, sem: Constexpr):
    """A warp's pair to its slot in every block of the cluster: `utils.publish` up to its wait."""
    rows, (warps, blocks) = buffer.shape
    if tk.warp_id() == 0:
        tk.expect_bytes(sem, rows * warps * blocks * 8)
    if tk.lane_id() < blocks:
        slot = elem_pointer(buffer, (tk.warp_id() // warps, (tk.warp_id() % warps, cute.arch.block_idx_in_cluster())))
        tk.store_remote(cute.recast_ptr(slot, dtype=Float32), (mean, squares), sem, tk.lane_id())
