"""From an epilogue subtile in shared memory to rows that begin anywhere."""
import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ... import tile as tk

AT_ONCE = 8  # loads of a thread in flight


@cute.jit
def put_rows(dst: cute.Tensor, src: tk.SharedTile, row0, col0):
    """dst[row0 + i, col0 + j] = src[i, j] inside dst: any stride, any alignment. A warpgroup, after its barrier:
    neighbouring threads write neighbours of a row."""
    rows, cols = src.type.rows, src.type.cols
    thread, apart = tk.thread_in_warpgroup(), const_expr(tk.WARPGROUP // cols)
    row, col = thread // cols, thread % cols
    if col0 + col < cute.size(dst, mode=[1]):
        left = cute.size(dst, mode=[0]) - row0 - row
        at = dst.iterator + cute.crd2idx((row0 + row, col0 + col), dst.layout)
        line = cute.make_tensor(at, cute.make_layout((rows,), stride=(dst.stride[0],)))
        for i in cutlass.range(rows // apart // AT_ONCE, unroll=1):
            held = cute.make_rmem_tensor((AT_ONCE,), src.type.dtype)
            for j in cutlass.range_constexpr(AT_ONCE):
                held[j] = src.tensor[row + (i * AT_ONCE + j) * apart, col]
            for j in cutlass.range_constexpr(AT_ONCE):
                if (i * AT_ONCE + j) * apart < left:
                    line[(i * AT_ONCE + j) * apart] = held[j]
