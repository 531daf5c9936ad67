"""The warps of the queries' kernel that bring rows' numbers, a chunk ahead of the others: delta, and what the forward
has left."""
import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.query_tiles import DELTA, INVERSE, MOST
from tkq.tile.warp_products import diagonal_ABt, has_diagonal

DELTA_WARPS = 2
ROWS = CHUNK // DELTA_WARPS  # of each
BLOCK = 8  # rows of a product


@cute.jit
def bring_numbers(g, s, t, warp):
    """A lane has a row. delta[i] = o[i] do[i], in a loop, as there are few registers: o, which nobody else has, comes
    from global memory. warp: which of the two."""
    ring, to, row = s.gradients.ring(), s.numbers, warp * ROWS + tk.lane_id()
    for i in cutlass.range(t.chunks, unroll=1):
        at = cutlass.min(i * CHUNK + row, g.tokens - 1)
        most, inverse = g.most[t.batch, at, t.head], g.inverse[t.batch, at, t.head]
        s.gradients.wait(ring)
        s.deltas.acquire_empty(tk.Ring(ring.count, 1))
        to[row, MOST], to[row, INVERSE] = most, inverse
        for n in cutlass.range(ROWS // BLOCK, unroll=1):
            first = warp * ROWS + n * BLOCK
            of_o = cutlass.min(i * CHUNK + first + tk.lane_id() // 4, g.tokens - 1)
            found = diagonal_ABt(g.o[t.batch, of_o, t.head, None], s.a[ring.stage], first)
            if has_diagonal():
                to[first + tk.lane_id() // 4, DELTA] = found
        s.gradients.release(ring)
        s.deltas.commit(tk.Ring(ring.count, 1))
        if i * CHUNK + row < g.tokens:
            g.delta[t.batch, i * CHUNK + row, t.head] = to[row, DELTA]
        ring.advance()


def take(s, rows, which):
    """rows[i] = a number of row i."""
    for r in range(2):
        rows.tensor[r] = s.numbers[tk.first_row() + 8 * r, which]
