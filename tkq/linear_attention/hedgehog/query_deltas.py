"""The warps of the queries' kernel that make delta, from tiles that the others have, too."""
import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.tile.warp_products import diagonal_ABt, has_diagonal

DELTA_WARPS = 2
ROWS = CHUNK // DELTA_WARPS  # of each
BLOCK = 16  # rows of a product


@cute.jit
def make_deltas(s, t, warp):
    """delta[i] = o[i] do[i], to shared memory. warp: which of the two. A loop, as there are few registers."""
    one, to = s.outputs.ring(), s.delta
    for _ in cutlass.range(t.chunks, unroll=1):
        s.outputs.wait(one)
        s.gradients.wait(one)
        s.deltas.acquire_empty(one)
        for n in cutlass.range(ROWS // BLOCK, unroll=1):
            first = warp * ROWS + n * BLOCK
            found = diagonal_ABt(s.o[0], s.a[0], first)
            if has_diagonal():
                for r in cutlass.range_constexpr(2):
                    to[first + tk.lane_id() // 4 + 8 * r, 0] = found[r]
        s.outputs.release(one)
        s.gradients.release(one)
        s.deltas.commit(one)
        one.advance()
