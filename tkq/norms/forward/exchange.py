"""The parts of `utils.publish`, for warps that send several pairs of floats before they wait for any."""
from typing import Optional

import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from ... import tile as tk
from ...utils import elem_pointer, unpack_f32x2


@cute.jit
def send(pair: Int64, buffer: cute.Tensor, mbar_ptr: Optional[cute.Pointer]):
    """Put a warp's pair (`pack_f32x2`) where all warps of its row can read it, and do not wait for theirs.

    buffer: (rows, (warps to a row, blocks of the cluster)), Int64. Without mbar_ptr the row lies in one block, which is
    to meet before the buffer is read; with it, it is that mbarrier's phase 0 that is to be waited for.
    """
    rows, (warps, blocks) = buffer.shape
    row, col = tk.warp_id() // warps, tk.warp_id() % warps
    if const_expr(mbar_ptr is None):
        if tk.lane_id() == 0:
            buffer[row, col] = pair
    else:
        sem = tk.Semaphore(mbar_ptr)
        if tk.warp_id() == 0:
            tk.expect_bytes(sem, rows * warps * blocks * 8)
        if tk.lane_id() < blocks:
            slot = elem_pointer(buffer, (row, (col, cute.arch.block_idx_in_cluster())))
            tk.store_remote(cute.recast_ptr(slot, dtype=Float32), unpack_f32x2(pair), sem,
                            tk.lane_id())
