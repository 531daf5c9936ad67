"""The state, chunk by chunk: the part of `TokenRows` that keeps it."""
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Uint32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.spec import LinearSpec
from tkq.linear_attention.token_rows.plan import GROUPS


class RowsState:
    """S, K by V, or S', V by K, whichever has 64 rows: one warpgroup has it in accumulators. Before a chunk's tokens
    come to it, it is rounded to shared memory, in two parts where there are sums of o times x, for the outputs:

        S = e^G[63] S + (f K)' V    or    S' = e^G[63] S' + (f V)' K,    f: what decays to the chunk's end
    """

    def __init__(self, spec: LinearSpec, gate: Any, pairs: Any, places: int):
        """places: of rounded states in shared memory, at most GROUPS."""
        self.spec, self.gate, self.dtype, self.pairs, self.places = spec, gate, gate.dtype, pairs, places
        self.by_keys = spec.value_dim > spec.head_dim
        self.cols, self.parts = max(spec.head_dim, spec.value_dim), 1 + spec.exact
        self.tile = tk.st(CHUNK, self.cols, self.dtype)

    def tiles(self, shared, stage):
        """The parts of the state of a chunk. The pipe has a stage for each of the outputs' warpgroups, so that each
        waits for its own; with one place it is that of all stages."""
        first = self.parts * stage if self.places > 1 else 0
        return [shared.state[first + n] for n in range(self.parts)]

    def view(self, x: Any, t):
        """Of states (row, head, K, V): the task's, as the accumulators have it."""
        of_head = x[t.state, t.head, None, None]
        return of_head if self.by_keys else cute.make_tensor(of_head.iterator, cute.select(of_head.layout, [1, 0]))

    def first(self, t, part: int):
        """The first column in global memory of 64 of the state's."""
        return CHUNK * self.pairs.columns(t, part)

    @cute.jit
    def keep(self, g, s, t, order: Constexpr):
        """order(t, i): the i-th chunk that is visited."""
        state, rounded = tk.rt_fl(self.cols), tk.rt(self.cols, self.dtype)
        taken, rest = tk.rt(CHUNK, self.dtype), tk.rt(CHUNK, self.dtype)
        own, factor = tk.rt(CHUNK, self.dtype), tk.cv(CHUNK)
        tokens, factors, out, free = s.tokens.ring(), s.factors.ring(), s.states.ring(), s.states.ring()
        free.count[0] = Uint32(GROUPS - self.places)
        narrow, wide = (s.k, s.v) if self.by_keys else (s.v, s.k)
        tk.zero(state)
        if const_expr(self.spec.initial is not None):
            for part in cutlass.range_constexpr(self.cols // CHUNK):
                tk.load_from(tk.columns(state, CHUNK * part, CHUNK), self.view(g.initial, t), 0, self.first(t, part))
        for _ in cutlass.range(t.chunks, unroll=1):
            s.states.acquire_empty(free)
            tiles = self.tiles(s, out.stage)
            tk.copy(rounded, state)
            tk.store(tiles[0], rounded)
            if const_expr(self.spec.exact):
                tk.apply_narrow(rounded, lambda x, of_x: x - of_x, state, rounded)
                tk.store(tiles[1], rounded)
            tk.publish()
            s.states.commit(out)
            s.tokens.wait(tokens)
            tk.load_T(own, narrow[tokens.stage])
            s.factors.wait(factors)
            tk.load_shared_cols(factor, s.gate.to_end[None, factors.stage])
            tk.apply_narrow(taken, lambda x, f: x * f, own, factor)
            tk.mul(state, state, s.gate.total[0, factors.stage])
            tk.mma_AB(state, taken, wide[tokens.stage])
            if const_expr(self.spec.exact):
                tk.apply_narrow(rest, lambda x, f, of_x: x * f - of_x, own, factor, taken)
                tk.mma_AB(state, rest, wide[tokens.stage])
            tk.mma_wait(0)
            s.tokens.release(tokens)
            s.factors.release(factors)
            for ring in (tokens, factors, out, free):
                ring.advance()
        if const_expr(self.spec.final is not None):
            for part in cutlass.range_constexpr(self.cols // CHUNK):
                tk.store_elements(self.view(g.final, t), tk.columns(state, CHUNK * part, CHUNK), 0, self.first(t, part))
