"""What a state gives for a chunk's queries, and with the delta rule for its keys."""
import cutlass.cute as cute

import tkq.tile as tk
from tkq.linear_attention.spec import NARROW, LinearSpec

LOADED = 16  # columns of a wide state that are asked for at a time


class StateProducts:
    """O' = S' Q', and with the delta rule W' = S' K': the operand is S' rounded to 16 bits.

    Up to 128 columns of K it is rounded as a whole; but where there are both products, O' begins when W' has become the
    corrected values, and for each the state is rounded a few columns at a time. Registers of both, and of the state in
    16 bits, would be more than two warpgroups have: ptxas would wait for each product of the kernel.

    A wider state takes up to 128 registers of a thread by itself. It is always rounded a few columns at a time, each
    piece while the one before it is multiplied; and with the delta rule corrected values wait for their product with P
    in shared memory, in the place of the values. One warpgroup has such a state: barrier is its."""

    def __init__(self, spec: LinearSpec, delta, second, barrier: int):
        self.spec, self.delta, self.wide, self.barrier = spec, delta, spec.head_dim > NARROW, barrier
        self.second = second
        self.piece = 16 if spec.exact else 32
        both = delta.forward and spec.queried
        self.updates_in_smem = both and self.wide  # do corrected values wait in shared memory?
        self.behind = both and not self.wide  # do queries meet the state behind the corrected values?
        # does the state meet queries a few columns at a time?
        self.pieces = second.query or (second.pair and spec.exact_outputs)

    def load(self, state, x, row0):
        """state = x from row0 on; of a wide one addresses of 16 columns at a time are in registers."""
        for first in range(0, state.cols, LOADED if self.wide else state.cols):
            if first:
                cute.arch.sync_warp()
            part = tk.columns(state, first, min(LOADED, state.cols - first)) if self.wide else state
            tk.load_from(part, x, row0, first)

    def store(self, x, state, row0):
        """x from row0 on = state."""
        for first in range(0, state.cols, NARROW):
            part = tk.columns(state, first, min(NARROW, state.cols - first)) if self.wide else state
            tk.store_elements(x, part, row0, first)

    def begin(self, c, s, stage):
        """Under way: what the state gives for keys, c.w, and for queries, c.o."""
        if self.behind or self.pieces:
            self.in_pieces(c, [(c.w, s.k[stage])] if self.behind else self.queries(c, s, stage))
        elif not self.wide:
            tk.copy(c.s16, c.s)
            self.delta.of_state(c, s.k[stage])
            for o, q in self.queries(c, s, stage):
                tk.mm_ABt(o, c.s16, q)
        elif self.delta.forward:
            self.in_pieces(c, [(c.w, s.k[stage])])
        elif self.spec.queried:
            self.in_pieces(c, [(c.o, s.q[stage])])

    def queries(self, c, s, stage):
        """(outputs, queries) of a narrow state."""
        own = [(c.o, s.q[stage])] if self.spec.queried else []
        return own + self.second.queries(c, s, stage)

    def rest(self, c, s, stage):
        """With sums of o times another tensor: c.o has what rounding took from the state, too."""
        if self.spec.exact_outputs and not (self.wide or self.pieces):
            tk.apply_narrow(c.s16, lambda wide, rounded: wide - rounded, c.s, c.s16)
            for o, q in self.queries(c, s, stage):
                tk.mma_ABt(o, c.s16, q)
            tk.mma_wait(0)

    def behind_updates(self, c, s, stage):
        """c.o of a wide state that has not decayed, once c.w is the corrected values and no longer in use there."""
        if self.behind:
            self.in_pieces(c, [(c.o, s.q[stage])], "assembler")
            tk.mma_wait(0)
        if self.updates_in_smem:
            tk.store_T(s.v[stage], c.w)
            tk.publish()
            self.in_pieces(c, [(c.o, s.q[stage])])
            tk.mma_wait(0)
            tk.sync(self.barrier, tk.WARPGROUP)

    def add_scores(self, c, s, tile, scores):
        """c.o += V' P' is under way. tile: of values. Those of launches that have little room stay in shared memory."""
        if self.updates_in_smem or self.second.there:
            tk.mma_AtBt(c.o, s.v[tile], s.p[scores])
        else:
            tk.mma_ABt(c.o, c.v, s.p[scores])

    def add_rest_of_scores(self, c, s, tile, scores):
        """Likewise, what rounding took from P."""
        tk.mma_ABt(c.o, c.v, s.rest[scores])

    def in_pieces(self, c, products, again=True):
        """d = S' operand' for each pair of them, the last of it under way; with sums of o times another tensor S' is in
        two parts. Where there are two products, all of the first part comes first: pieces of both would be too many
        registers."""
        apart = len(products) > 1
        piece, multiply = 32 if apart else self.piece, tk.mm_ABt
        rest = tk.rt(c.s16.cols, c.s16.dtype) if self.spec.exact else None
        for part in range(1 + (apart and self.spec.exact)):
            for first in range(0, self.spec.head_dim, piece):
                n, issued = min(piece, self.spec.head_dim - first), []
                if part and n == self.spec.head_dim:
                    tk.mma_wait(0)  # the first part of the only piece is still read from the registers
                state, rounded = tk.columns(c.s, first, n), tk.columns(c.s16, first, n)
                tk.copy(rounded, state, again)
                if not part:
                    issued.append(c.s16)
                if self.spec.exact and (part or not apart):
                    tk.apply_narrow(tk.columns(rest, first, n), lambda x, of_x: x - of_x, state, rounded)
                    issued.append(rest)
                for operand in issued:
                    for d, other in products:
                        multiply(d, operand, other, k=(first, first + n))
                    multiply = tk.mma_ABt
                if first or part:
                    tk.mma_wait(len(products) * len(issued))  # the registers of the piece before are free
