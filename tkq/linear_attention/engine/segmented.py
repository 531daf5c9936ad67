"""Blocks that have a segment of a sequence each: the part of `LinearAttention` that knows of segments."""
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import ALL, CHUNK
from tkq.linear_attention.overlap.segments import OverlappingSegments
from tkq.linear_attention.spec import LinearSpec
from tkq.runtime.compile import fake


def visited(t, i, reverse):
    """The i-th chunk that a task goes through."""
    i = t.chunks - 1 - i if reverse else i
    return i if t.first is None else t.first + i


def is_needed(reaches, n, reverse: bool):
    """Does a half of a segment, the n-th of all of them, add anything behind the segment? Of two that leave nothing of
    a state the one that is gone through first does not. reaches: what reaches its end and the other one's."""
    mine, other = reaches
    return (n % 2 != int(reverse)) | (mine == ALL) | (other == ALL)


class Segmented:
    """Of each sequence states have N rows, of which segment n is the n-th; a segment has ceil(chunks / N) chunks, the
    last ones fewer or none.

    With part "states" a segment begins with zeros, and its last state comes out: what it adds. What becomes of a state
    that it begins with is, without the delta rule, a factor for each head, the product of what the chunks' decays are
    (`decays`); with it, a matrix of K x K, which is what the same recurrence makes of the identity where values are 0;
    reversed it is the transpose of that, and known. It is made with part "transfers", by the inverses that those made
    with part "states": values are then rows behind the last token, which TMA reads as zeros.

    With reach, of the delta rule, of each segment and head only those chunks are gone through that reach the state at
    its end (see `split.reach.Reach`), by transfers all of them, or none, and no transfer is stored.

    With part "outputs" a segment begins with the state that `split.combine.CombineStates` has made of those before
    it."""

    def __init__(self, spec: LinearSpec):
        self.spec, self.there = spec, spec.part is not None
        self.transfer = spec.part == "transfers"
        self.writes_states = self.there and not spec.writes
        self.decays = self.writes_states and spec.gated and not spec.delta
        self.columns = spec.head_dim if self.transfer else spec.value_dim  # of a last state

    # ---- host ----------------------------------------------------------------------------------

    def fake_decays(self, rows, heads):
        """For the compiler; None without."""
        return fake.tensor("fp32", (rows, heads), align=4) if self.decays else None

    def fake_reach(self, rows, HO):
        """Likewise, of segments, or of overlapping ones."""
        if self.spec.overlapping:
            return OverlappingSegments(True).fake_reach(rows, HO)
        return fake.tensor("int32", (rows, HO), align=4) if self.spec.reach else None

    def rows(self, operands):
        """The states that have one for each segment."""
        return operands.final if self.writes_states else operands.initial

    def heads(self, operands):
        """How many are computed."""
        if self.writes_states:
            return operands.final.shape[1]
        return operands.q.shape[2] if self.spec.summed else operands.o.shape[2]  # summed, heads have their own

    def count(self, operands):
        """Segments of a sequence; None without."""
        return Int32(self.rows(operands).shape[0]) // operands.q.shape[0] if self.there else None

    def blocks(self, operands, sequences):
        """Of a head and a part of V."""
        return self.rows(operands).shape[0] if self.there else sequences

    # ---- device --------------------------------------------------------------------------------

    def row_of(self, block):
        """Which row of states a block has: of halves first those of which none is left out, so that what has nothing to
        do fills the gaps behind them."""
        if not self.spec.halves:
            return block
        count = cute.arch.grid_dim()[2] // 2
        back = int(self.spec.reverse)
        return block % count * 2 + cutlass.select_(block < count, 1 - back, back)

    def of_block(self, g, n, head, chunks):
        """(the n-th block's sequence, its first chunk or None, how many it goes through); chunks: of the sequence."""
        if not self.there:
            return n, None, chunks
        each = cute.ceil_div(chunks, g.segments)
        first = n % g.segments * each
        chunks = cutlass.max(cutlass.min(each, chunks - first), 0)
        if self.spec.reach:
            reach = g.reach[n, head]
            if self.transfer:
                chunks = cutlass.select_(reach < ALL, 0, chunks)
            else:
                reached = cutlass.min(self.of_half(g, n, head, reach), chunks)
                first, chunks = first + (0 if self.spec.reverse else chunks - reached), reached
        return n // g.segments, first, chunks

    def of_half(self, g, n, head, reach):
        """0 for a half that is left out."""
        if not self.spec.halves:
            return reach
        reaches = reach, g.reach[n ^ 1, head]
        return cutlass.select_(is_needed(reaches, n, self.spec.reverse), reach, 0)

    def chunk_of_values(self, g, chunk):
        """Where a chunk's values are read."""
        return cute.ceil_div(g.tokens, CHUNK) if self.transfer else chunk

    @cute.jit
    def first_state(self, g, t, state: tk.RegTile, row0):
        """Zeros, or the identity."""
        tk.zero(state)
        if const_expr(self.transfer):
            one = Float32(1.0)
            view = state.rows_view
            for r in cutlass.range_constexpr(2):
                row = row0 + tk.first_row() + 8 * r
                for j in cutlass.range_constexpr(state.cols // 4):
                    if row == tk.first_col() + 8 * (j // 2) + j % 2:
                        view[r, j] = one

    def stores(self, g, t):
        """Is a block's last state stored? A transfer is not where nothing is left of a state, nor is that of a half
        that is left out: none reads them."""
        if self.transfer and self.spec.reach:
            return g.reach[t.state, t.head] == ALL
        if not self.spec.halves:
            return True
        reaches = g.reach[t.state, t.head], g.reach[t.state ^ 1, t.head]
        return is_needed(reaches, t.state, self.spec.reverse)

    def begin(self) -> Any:
        """The product of the decays so far; None without."""
        if not self.decays:
            return None
        decay = cute.make_rmem_tensor((1,), Float32)
        decay[0] = Float32(1.0)
        return decay

    def decay(self, decay, shared, place):
        """With a chunk's. place: where factors of the head are."""
        if self.decays:
            decay[0] = decay[0] * shared.total[0, place]

    @cute.jit
    def put_decay(self, g, t, decay, wg):
        """Once the last chunk is in it, by the block that has the first columns."""
        if const_expr(self.decays):
            if t.part + wg == 0 and tk.thread_in_warpgroup() == 0:
                g.decays[t.state, t.head] = decay[0]
