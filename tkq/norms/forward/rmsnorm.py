"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight + bias, row by row (Zhang and Sennrich, 2019)."""
import operator

import cutlass.cute as cute
from cutlass import Float32, Int64

from ... import tile as tk
from ...utils import WARP, collect, lanes_used, pack_f32x2, publish, row_reduce, rsqrt, unpack_f32x2, warp_reduce


class RMSNorm:
    """A part of `row_norm.RowNorm`: the statistics of a row."""

    def exchanged(self, spec):
        """Of a sum that is written rounded, two sums of squares travel together."""
        return Int64 if spec.rounded else Float32

    def statistics(self, kernel, rows, eps):
        return [self._of_row(kernel, row, eps, r == 0) for r, row in enumerate(rows)]

    def normalise(self, x, statistics):
        return x * statistics[1]

    def _of_row(self, kernel, row, eps, first):
        squares = None
        for j in range(kernel.tile.blocks):
            of_block = [x * x for x in kernel.seen(row, j)]
            squares = of_block if squares is None else [a + b for a, b in zip(squares, of_block, strict=True)]
        hook = tk.cluster_wait if first and kernel.cluster_n > 1 else None
        of_row = self._reduced if len(squares) == 1 else self._reduced_pair
        sums = of_row(squares, row, hook, kernel.tile.threads_per_row)
        return [(None, rsqrt(s * (1.0 / kernel.N) + eps)) for s in sums]

    def _reduced(self, squares, row, hook, threads_per_row):
        return [row_reduce(squares[0], cute.ReductionOp.ADD, threads_per_row, row.buffer, row.mbar_ptr, hook_fn=hook)]

    def _reduced_pair(self, squares, row, hook, threads_per_row):
        """The same of two at once, in one exchange."""
        lanes = min(threads_per_row, WARP)
        sums = [warp_reduce(s.reduce(cute.ReductionOp.ADD, 0.0, 0), operator.add, lanes) for s in squares]
        if hook is not None:
            hook()
        slots = cute.size(row.buffer, mode=[1])
        if slots == 1:
            return sums
        publish(pack_f32x2(*sums), row.buffer, row.mbar_ptr)
        parts = collect(row.buffer, Int64(0))
        pairs = [unpack_f32x2(parts[i]) for i in range(cute.size(parts))]
        return [warp_reduce(sum(of_one[1:], of_one[0]), operator.add, lanes_used(slots))
                for of_one in zip(*pairs, strict=True)]
