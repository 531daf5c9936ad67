"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight + bias, row by row (Zhang and Sennrich, 2019)."""
import cutlass.cute as cute

from .. import tile as tk
from ..utils import row_reduce, rsqrt
from .row import RowNorm


class RMSNorm(RowNorm):
    def statistics(self, row, eps, first):
        squares = None
        for j in range(self.tile.blocks):
            x = row.block(j)
            squares = x * x if squares is None else squares + x * x
        mean_square = row_reduce(
            squares, cute.ReductionOp.ADD, self.tile.threads_per_row, row.buffer, row.mbar_ptr,
            hook_fn=tk.cluster_wait if first and self.cluster_n > 1 else None) * (1.0 / self.N)
        return None, rsqrt(mean_square + eps)

    def normalise(self, x, statistics):
        return x * statistics[1]
