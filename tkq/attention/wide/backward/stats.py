"""Before the passes: what they take of each query row."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div

THREADS, WARP, VECTOR = 256, 32, 8  # a warp has a row, and reads 16 bytes a lane


class RowStats:
    """stats[0] = -lse * log2(e) and stats[1] = dlse - rowsum(o * do), (2, B, H, Sq).

    A row that sees no key has -inf and 0: then exp2(.. - inf) is 0, and nothing of it enters a gradient."""

    def __init__(self, width: int):
        self.steps = width // (WARP * VECTOR) + (width % (WARP * VECTOR) > 0)

    def launch(self, do, o, lse, dlse, stats, stream: cuda.CUstream):
        """do, o: (B, Sq, H, D). lse, dlse: (B, H, Sq) fp32, dlse perhaps None."""
        _, batch, heads, rows = stats.shape  # all in x: the other dimensions of a grid end at 65535
        self.kernel(do, o, lse, dlse, stats).launch(
            grid=[batch * heads * ceil_div(rows, THREADS // WARP), 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, do: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, dlse: Optional[cute.Tensor],
               stats: cute.Tensor):
        _, _, heads, rows = stats.shape
        blocks = ceil_div(rows, THREADS // WARP)
        n, x = cute.arch.block_idx()[0] // blocks, cute.arch.block_idx()[0] % blocks
        batch, head, row = n // heads, n % heads, x * (THREADS // WARP) + tk.warp_id()
        if row < lse.shape[2]:
            first, second = -Float32.inf, Float32(0.0)
            total = self.row_sum(do[batch, row, head, None], o[batch, row, head, None])
            of_row = lse[batch, head, row]
            if of_row != -Float32.inf:
                first, second = -of_row * tk.LOG2E, -total
                if cutlass.const_expr(dlse is not None):
                    second = second + dlse[batch, head, row]
            if tk.lane_id() == 0:
                stats[0, batch, head, row] = first
                stats[1, batch, head, row] = second

    def row_sum(self, a, b):
        """Of two rows, over the warp: lanes beyond the columns repeat the last, and count for nothing."""
        total, vectors = Float32(0.0), cute.size(a) // VECTOR
        for i in range(self.steps):
            at = tk.lane_id() + i * WARP
            pair = [cute.make_rmem_tensor((VECTOR,), a.element_type) for _ in range(2)]
            for x, to in zip((a, b), pair):
                cute.autovec_copy(cute.local_tile(x, (VECTOR,), (cutlass.min(at, vectors - 1),)), to)
            part = Float32(0.0)
            for e in range(VECTOR):
                part = part + Float32(pair[0][e]) * Float32(pair[1][e])
            total = total + cutlass.select_(at < vectors, part, Float32(0.0))
        return cute.arch.warp_reduction(total, lambda p, q: p + q)
