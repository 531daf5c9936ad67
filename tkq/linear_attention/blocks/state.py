"""The state of a gated delta rule, in the accumulators of warpgroups, block by block."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import EDGE, PANEL, rest_of
from tkq.linear_attention.blocks.qk_tiles import BLOCKS, QkTiles
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.delta import kept_of
from tkq.linear_attention.engine.segmented import visited
from tkq.linear_attention.outputs import put, ready
from tkq.tile.dtypes import element_type

OUT_BARRIER = 2  # named barriers, one of each warpgroup


@dataclass(frozen=True)
class Held:
    """Registers of 64 rows of V."""

    s: tk.RegTile  # the state, transposed: V by K
    s16: tk.RegTile  # the same, rounded: an operand
    v: tk.RegTile  # a chunk's values, transposed, then what is written
    u: tk.RegTile  # the same for the inverse's second part, then with what decays to their block's end
    x: tk.RegTile  # outputs, transposed, rounded
    both: tk.RegTile  # of a block: what the state gives for keys and for queries
    given: tk.RegTile  # of a block: what is written
    some: tk.RegTile  # of a block: outputs
    few: tk.ColVec  # factors of a block's tokens
    more: tk.ColVec


class BlockState:
    """Of each block, with e^G what has decayed since its start, U and O the block's:

        U = (I + L)^-1 (beta V - beta e^G K S),  O = scale e^G Q S + P U
        S = e^G[15] S + (e^(G[15] - G) U)' K

    The inverse is an operand in two parts (see `pairs.put_two`). The state is rounded a few columns at a time while
    those before them are multiplied, and decays behind that, where it waits for U. With updates it is R that is solved,
    by M in the place of L, and U is that times beta (see `engine.delta`)."""

    def __init__(self, spec: Any, sequences: Any, qk_tiles: QkTiles, piece: int):
        self.qk_tiles = qk_tiles
        self.spec, self.sequences, self.piece, self.gated = spec, sequences, piece, spec.gate != "none"
        self.updates = spec.updates

    def registers(self) -> Held:
        """Room for them."""
        K, dtype = self.spec.head_dim, element_type(self.spec.dtype)
        return Held(tk.rt_fl(K), tk.rt(K, dtype), *[tk.rt(CHUNK, dtype) for _ in range(3)],
                    tk.rt_fl(2 * EDGE), *[tk.rt_fl(EDGE) for _ in range(2)], *[tk.cv(EDGE) for _ in range(2)])

    @cute.jit
    def keep(self, g, s, t, wg):
        """All chunks of a task, by the wg-th of the state's warpgroups."""
        c, row0 = self.registers(), (t.part + wg) * CHUNK
        ring, scores = s.tokens.ring(), s.scores.ring()
        first_state(self, g, t, c.s, row0)
        for i in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(ring)
            s.scores.wait(scores)
            self.read_values(s, c, wg, ring.stage)
            tk.mma_wait(0)  # nothing is under way: ptxas, which forgets it in a loop, would wait at each use of c.s
            for block in cutlass.range_constexpr(CHUNK // EDGE):
                self.add(c, s, (block, wg), (ring.stage, scores.stage))
            self.put(g, s, t, c.x, (visited(t, i, False), wg))
            s.tokens.release(ring)
            s.scores.release(scores)
            ring.advance()
            scores.advance()
        if const_expr(self.spec.final is not None):
            self.last_state(g, t, c.s, row0)
        tk.store_wait(read=False)

    @cute.jit
    def last_state(self, g, t, state: tk.RegTile, row0):
        """Store the final state; of overlapping segments the block does that has the last chunk."""
        last = True
        if const_expr(self.spec.overlapping):
            last = (t.chunks > 0) & (t.first + t.chunks == cute.ceil_div(g.tokens, CHUNK))
        if last:
            tk.store_elements(self.sequences.state(g.final, t), state, row0, 0)

    @cute.jit
    def read_values(self, s, c, wg, stage):
        """A chunk's, transposed."""
        for i in cutlass.range_constexpr(len(s.v)):
            if wg == i:
                tk.load_T(c.v, s.v[i][stage])

    def add(self, c, s, at, stages):
        """A block's outputs, and the state behind it. at: the block, the warpgroup. stages: of tokens and of scores."""
        (block, _), (tokens, scores) = at, stages
        inside, there = dict(k=(block * EDGE, (block + 1) * EDGE)), (block * EDGE, EDGE)
        of, values = s.factors, tk.columns(c.v, *there)
        meet(self, c, c.both, lambda panel: self.qk_tiles.both(s.qk_tiles, tokens, block, panel))
        if self.gated:
            tk.mul(c.s, c.s, of.total[block, scores])
        tk.mma_wait(0)
        factors_of(c.more, of.erase, block, scores)
        given = tk.columns(c.both, 0, EDGE)
        if self.updates:
            tk.apply_narrow(values, lambda v, w, e: v - e * w, values, given, c.more)
        else:
            factors_of(c.few, of.beta, block, scores)
            tk.apply_narrow(values, lambda v, w, b, e: b * v - e * w, values, given, c.few, c.more)
        rest = rest_of(block)
        tk.copy(tk.columns(c.u, *rest), values)
        tk.mm_ABt(c.given, c.v, s.inverse[scores], b_part=block, **inside)
        tk.mma_ABt(c.given, c.u, s.inverse[scores], b_part=block, k=(rest[0], sum(rest)))
        factors_of(c.few, of.at_query, block, scores)
        tk.mul_col(c.some, tk.columns(c.both, EDGE, EDGE), c.few)
        tk.mma_wait(0)
        if self.updates:
            self.keep_updates(c, s, at, scores)
        taken = c.v
        if self.gated:
            taken = c.u
            factors_of(c.more, of.to_end, block, scores)
            tk.apply_narrow(tk.columns(c.u, *there), lambda u, f: u * f, c.given, c.more)
        tk.copy(values, c.given)
        for panel in range(self.qk_tiles.panels):
            tk.mma_AB(tk.columns(c.s, panel * PANEL, PANEL), tk.columns(taken, *there),
                      self.qk_tiles.keys(s.qk_tiles, tokens, block, panel))
        tk.mma_ABt(c.some, c.v, s.p[scores], b_part=block, **inside)
        tk.mma_wait(0)
        tk.copy(tk.columns(c.x, *there), c.some)

    def keep_updates(self, c, s, at, scores):
        """c.given, which is R, becomes U; what gradients take of it to shared memory (see `engine.delta`)."""
        block, wg = at
        factors_of(c.few, s.factors.beta, block, scores)
        kept = tk.rt(EDGE, element_type(self.spec.dtype))
        tk.apply_narrow(kept, lambda r, b: r * kept_of(b), c.given, c.few)
        if block == 0:
            ready(OUT_BARRIER + wg)
        tk.store_T(s.pieces[wg * BLOCKS + block], kept)
        tk.mul_col(c.given, c.given, c.few)

    @cute.jit
    def put(self, g, s, t, x, at: Constexpr):
        """A chunk's outputs through shared memory: those before have left it. at: the chunk, the warpgroup."""
        chunk, wg = at
        stored = True
        if const_expr(self.spec.overlapping):
            stored = chunk >= t.stored_from
        if stored:
            put(g.o, s.o, x, (t.batch, t.head, chunk, t.part), OUT_BARRIER, wg, self.updates)
        if const_expr(self.updates):
            if tk.first_warp_of_group():
                tk.store_async(g.dv, s.pieces.stacked(BLOCKS)[wg], (t.batch, t.head, chunk, t.part + wg))


# ---- what gradients' state does alike --------------------------------------------------------------------------------


@cute.jit
def first_state(of: Constexpr, g, t, state: tk.RegTile, row0):
    """The task's; zeros without one, and in front of overlapping segments behind the first. of: a class of states."""
    if const_expr(of.spec.initial is None):
        tk.zero(state)
    else:
        tk.load_from(state, of.sequences.state(g.initial, t), row0, 0)
        if const_expr(of.spec.overlapping):
            begins = t.stored_from == 0
            tk.apply(state, lambda x: cutlass.select_(begins, x, Float32(0.0)), state)


def meet(of, c, found: tk.RegTile, operand):
    """found = what the state gives for tokens is under way. operand: a panel -> these tokens."""
    multiply = tk.mm_ABt
    for first in range(0, of.spec.head_dim, of.piece):
        tk.copy(tk.columns(c.s16, first, of.piece), tk.columns(c.s, first, of.piece))
        panel, k = first // PANEL, first % PANEL
        multiply(found, tk.columns(c.s16, panel * PANEL, PANEL), operand(panel), k=(k, k + of.piece))
        multiply = tk.mma_ABt


def factors_of(to: tk.ColVec, factors, block, stage):
    """Those of a block's tokens."""
    tk.load_shared_cols(to, cute.make_tensor(factors[None, stage].iterator + block * EDGE, cute.make_layout(EDGE)))
