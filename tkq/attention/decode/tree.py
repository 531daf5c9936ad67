"""Tree masks: which of the drafted tokens, the last keys of a sequence, each of its queries sees."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

import tkq.tile as tk
from tkq.attention.decode.plan import ROWS

INF = cutlass.Float32.inf
LOW = 0xFFFFFFFF  # the lower half of a mask


class TreeMask:
    """Bit j of a row's mask: does it see draft j, which is key ``first`` + j of the sequence? Keys before ``first`` are
    seen by all rows, and blocks of such keys need no mask."""

    def __init__(self, spec, config):
        self.spec, self.config = spec, config

    @cute.jit
    def load(self, g, regs, s, queries):
        """The masks of the thread's two rows, and the first draft. Rows behind the last take the last one's."""
        for r in cutlass.range_constexpr(2):
            query = (s.tile * ROWS + tk.first_row() + 8 * r) // g.group
            regs.tree[r] = g.tree[s.place, cutlass.min(query, queries - 1)]
        regs.drafts[0] = s.length - queries

    @cute.jit
    def apply(self, regs, block):
        """Scores of drafts that a row does not see become -inf. Keys behind the end are not there, whatever their
        bits."""
        view, keys = regs.s.rows_view, self.config.keys
        begin = block * keys - regs.drafts[0]
        if begin + keys > 0:
            for r in cutlass.range_constexpr(2):
                for word in cutlass.range_constexpr(keys // 32):
                    seen = self.bits(regs.tree[r], begin + tk.first_col() + 32 * word)
                    for j in cutlass.range_constexpr(8):
                        if seen & Int32(1 << 8 * (j // 2) + j % 2) == 0:
                            view[r, 8 * word + j] = -INF

    def bits(self, mask, start):
        """32 bits of a mask from bit ``start`` on, which may be below 0, where all are set, or behind the last."""
        before, after = cutlass.min(cutlass.max(-start, 0), 63), cutlass.min(cutlass.max(start, 0), 63)
        ones = (Int32(1) << cutlass.min(before, 31)) - 1
        ones = cutlass.select_(before > 31, Int32(-1), ones)
        early = Int32((mask << Int64(before)) & Int64(LOW)) | ones
        return cutlass.select_(start < 0, early, Int32((mask >> Int64(after)) & Int64(LOW)))
