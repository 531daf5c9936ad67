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
def make_deltas(g, s, t, warp):
    """delta[i] = o[i] do[i], to shared memory and to global memory. warp: which of the two."""
    one, first = s.outputs.ring(), warp * ROWS
    to = s.delta
    for i in cutlass.range(t.chunks, unroll=1):
        s.outputs.wait(one)
        s.gradients.wait(one)
        found = [x for n in range(ROWS // BLOCK) for x in diagonal_ABt(s.o[0], s.a[0], first + BLOCK * n)]
        s.outputs.release(one)
        s.gradients.release(one)
        s.deltas.acquire_empty(one)
        if has_diagonal():
            for n in cutlass.range_constexpr(len(found)):
                row = first + 8 * n + tk.lane_id() // 4
                to[row, 0] = found[n]
                if i * CHUNK + row < g.tokens:
                    g.delta[t.batch, i * CHUNK + row, t.head] = found[n]
        s.deltas.commit(one)
        one.advance()
