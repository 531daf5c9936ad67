"""The warps of the queries' kernel that bring rows' numbers: delta, from tiles that the others have, too, and what the
forward has left."""
import cutlass
import cutlass.cute as cute

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.query_tiles import DELTA, INVERSE, MOST
from tkq.tile.warp_products import diagonal_ABt, has_diagonal

DELTA_WARPS = 2
ROWS = CHUNK // DELTA_WARPS  # of each
BLOCK = 16  # rows of a product


@cute.jit
def bring_numbers(g, s, t, warp):
    """A lane has a row. delta[i] = o[i] do[i], in a loop, as there are few registers. warp: which of the two."""
    one, to, row = s.outputs.ring(), s.numbers, warp * ROWS + tk.lane_id()
    for i in cutlass.range(t.chunks, unroll=1):
        at = cutlass.min(i * CHUNK + row, g.tokens - 1)
        most, inverse = g.most[t.batch, at, t.head], g.inverse[t.batch, at, t.head]
        s.outputs.wait(one)
        s.gradients.wait(one)
        s.deltas.acquire_empty(one)
        to[row, MOST], to[row, INVERSE] = most, inverse
        for n in cutlass.range(ROWS // BLOCK, unroll=1):
            first = warp * ROWS + n * BLOCK
            found = diagonal_ABt(s.o[0], s.a[0], first)
            if has_diagonal():
                for r in cutlass.range_constexpr(2):
                    to[first + tk.lane_id() // 4 + 8 * r, DELTA] = found[r]
        s.outputs.release(one)
        s.gradients.release(one)
        s.deltas.commit(one)
        if i * CHUNK + row < g.tokens:
            g.delta[t.batch, i * CHUNK + row, t.head] = to[row, DELTA]
        one.advance()


def take(s, rows, which):
    """rows[i] = a number of row i."""
    for r in range(2):
        rows.tensor[r] = s.numbers[tk.first_row() + 8 * r, which]
