"""The state with gates for each column of k, in the accumulators of warpgroups, chunk by chunk."""
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.channels.columns import mul_columns, scaled_columns
from tkq.linear_attention.channels.parts import OUT_BARRIER, chunks, order
from tkq.linear_attention.channels.whole import BLOCKS, EDGE, STEPS
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.outputs import put


@dataclass(frozen=True)
class Held:
    """Registers of 64 rows of V."""

    s: tk.RegTile  # the state, transposed: V by K
    s16: tk.RegTile  # the same, rounded: an operand
    v: tk.RegTile  # a chunk's values, transposed
    o: tk.RegTile  # outputs, transposed: V by tokens
    x: tk.RegTile
    w: tk.RegTile  # with the delta rule: what the state gives for keys, then what it takes up
    beta: tk.ColVec
    erase: tk.ColVec
    half: tk.RegTile  # outputs of half of the tokens
    some: tk.RegTile  # outputs of a block of 16
    given: tk.RegTile  # with the delta rule, w of a block


class At(NamedTuple):
    """A chunk: which one, where its tokens and its scores are, of which warpgroup of the state."""

    chunk: Int32
    tokens: Int32
    scores: Int32
    wg: Int32


class ChannelState:
    """The part of `ChannelAttention` that keeps the state and writes outputs, where g, s and t are the kernel's. late:
    registers do not hold both of what the state gives, for keys and for queries: it is rounded a second time for the
    latter, behind the corrected values."""

    def __init__(self, spec, parts, sequences, late: bool):
        """parts: the kernel's `Delta`, `Whole` and `L2Norm`."""
        self.spec, self.sequences, self.late = spec, sequences, late
        self.delta, self.whole, self.l2norm = parts
        self.scored, self.solved = not spec.updates, bool(spec.delta)

    def registers(self, dtype) -> Held:
        """Room for them."""
        K = self.spec.head_dim
        return Held(tk.rt_fl(K), tk.rt(K, dtype), tk.rt(CHUNK, dtype), tk.rt_fl(CHUNK), tk.rt(CHUNK, dtype),
                    tk.rt_fl(CHUNK), tk.cv(CHUNK), tk.cv(CHUNK), tk.rt_fl(CHUNK // 2),
                    tk.rt_fl(EDGE), tk.rt_fl(EDGE))

    @cute.jit
    def keep(self, g, s, t, wg):
        """All chunks of a task, by the wg-th of the state's warpgroups."""
        c, row0 = self.registers(s.p.type.dtype), (t.part + wg) * CHUNK
        ring, scores = s.tokens.ring(), s.scores.ring()
        if const_expr(self.spec.initial is None):
            tk.zero(c.s)
        else:
            tk.load_from(c.s, self.sequences.state(g.initial, t), row0, 0)
        for i in cutlass.range(chunks(self.spec, g, t), unroll=1):
            at = At(order(self.spec, g, t, i), ring.stage, scores.stage, wg)
            s.tokens.wait(ring)
            s.scores.wait(scores)
            if const_expr(self.whole.there):
                if self.whole.holds(s.whole.found[None, at.scores]) or not self.whole.holds(
                        s.whole.found[None, at.scores], BLOCKS):
                    self.add_chunk(c, g, s, t, at)
                else:
                    self.add_blocks(c, g, s, t, at)
            else:
                self.add_chunk(c, g, s, t, at)
            s.tokens.release(ring)
            s.scores.release(scores)
            ring.advance()
            scores.advance()
        if const_expr(self.spec.final is not None):
            tk.store_elements(self.sequences.state(g.final, t), c.s, row0, 0)
        tk.store_wait(read=False)

    @cute.jit
    def add_chunk(self, c, g, s, t, at):
        """All of a chunk's tokens at once."""
        self.meet(c, g, s, t, at)
        self.take_up(c, g, s, t, at)

    # ---- a chunk by blocks of 16 tokens ----------------------------------------------------------

    @cute.jit
    def add_blocks(self, c, g, s, t, at):
        """A chunk whose decays `Whole` holds for in each block alone: the state takes up a block before it meets the
        next one."""
        self.of_group(s.v, at.wg, lambda v: tk.load_T(c.v, v[at.tokens]))
        for n in cutlass.range_constexpr(CHUNK // EDGE):
            block = CHUNK // EDGE - 1 - n if self.spec.reverse else n
            mul_columns(c.s, self.whole.step(n, s.whole, at.scores))
            tk.copy(c.s16, c.s)
            self.meet_block(c, g, s, at, block)
            self.take_up_block(c, s, at, block)
        mul_columns(c.s, self.whole.step(CHUNK // EDGE, s.whole, at.scores))
        if const_expr(self.spec.updates):
            self.put(g.dv, s, t, c.w, at)
            self.delta.times_beta(c, s.delta, at.scores)
        self.put(g.o, s, t, c.x if self.scored and not self.delta.back else c.w, at)
        if const_expr(self.delta.back):
            self.delta.times_beta(c, s.delta, at.scores)
            self.put(g.dv, s, t, c.w, at)

    def meet_block(self, c, g, s, at, block):
        """What the state gives for queries, and a block's values, corrected: in c.v, the former in c.some."""
        of, inside = dict(b_part=block), dict(b_part=block, k=(block * EDGE, (block + 1) * EDGE))
        if self.delta.forward:
            tk.mm_ABt(c.given, c.s16, s.started[at.scores], **of)
        if self.scored:
            tk.mm_ABt(c.some, c.s16, s.q[at.tokens], **of)
        tk.mma_wait(0)
        if self.scored:
            self.scale_outputs(c, c.some, g, s, (at, block * EDGE))
        if self.delta.forward:
            v, beta = tk.columns(c.v, block * EDGE, EDGE), self.of_block(c.beta, s.delta.beta, at, block)
            if self.spec.updates:
                tk.apply_narrow(v, lambda v, w: v - w, v, c.given)
            elif self.l2norm.there:
                tk.apply_narrow(v, lambda v, w, b, e: e * v - b * w, v, c.given, beta,
                                self.of_block(c.erase, s.delta.erase, at, block))
            else:
                tk.apply_narrow(v, lambda v, w, b: b * (v - w), v, c.given, beta)
            tk.mm_ABt(c.given, c.v, s.delta.inverse[at.scores], **inside)
            tk.mma_wait(0)
            if self.spec.updates:
                tk.copy(tk.columns(c.w, block * EDGE, EDGE), c.given)
                tk.mul_col(c.given, c.given, beta)
            tk.copy(v, c.given)

    def take_up_block(self, c, s, at, block):
        """A block's outputs, and the state behind it."""
        tokens = block * EDGE, (block + 1) * EDGE
        if self.scored:
            tk.mma_ABt(c.some, c.v, s.p[at.scores], b_part=block, k=tokens)
        tk.mma_AB(c.s, c.v, s.k[at.tokens], k=tokens)
        if self.scored:
            tk.mma_wait(1)
            tk.copy(tk.columns(c.x, *self.at_block(block)), c.some)
        if self.delta.back:
            tk.mm_AB(c.given, c.x, s.delta.inverse[at.scores], b_part=block, k=tokens)
            tk.mma_wait(0)
            tk.copy(tk.columns(c.w, *self.at_block(block)), c.given)
            tk.apply_narrow(tk.columns(c.x, *self.at_block(block)), lambda du, e: -(e * du), c.given,
                            self.of_block(c.erase, s.delta.erase, at, block))
            tk.mma_AB(c.s, c.x, s.started[at.scores], k=tokens)
        tk.mma_wait(0)

    def at_block(self, block):
        return block * EDGE, EDGE

    def of_block(self, to, factors, at, block):
        """Those of a block's tokens, in the first registers of a chunk's."""
        return self.of_tokens(to, factors, at, (block * EDGE, EDGE))

    def of_tokens(self, to, factors, at, tokens):
        """tokens: (the first, how many)."""
        first, n = tokens
        few = tk.columns(to, 0, n)
        tk.load_shared_cols(few, cute.make_tensor(factors[None, at.scores].iterator + first, cute.make_layout(n)))
        return few

    def scale_outputs(self, c, x, g, s, of):
        """What the state gives for queries, times the scale. of: (the chunk, the first of its tokens)."""
        at, first = of
        if self.l2norm.there:
            tk.mul_col(x, x, self.of_tokens(c.beta, s.l2norm.queries, at, (first, x.cols)))
        else:
            tk.mul(x, x, g.scale)

    # ---- a chunk at once -------------------------------------------------------------------------

    @cute.jit
    def meet(self, c, g, s, t, at):
        """c.v = values, with the delta rule corrected ones, c.o = what the state gives for queries; the state decays,
        and where this is late has taken up values."""
        if const_expr(self.late):
            self.round(c, s, at)
        else:
            self.begin(c, s, at)
        self.delta.of_state(c, s.started[at.scores] if self.solved else None)
        if const_expr(self.scored and not self.late):
            tk.mm_ABt(c.o, c.s16, s.q[at.tokens])
        tk.mma_wait(0)
        self.of_group(s.v, at.wg, lambda v: tk.load_T(c.v, v[at.tokens]))  # in registers that had the state, rounded
        self.updates(c, s.delta, at.scores, partial(self.put, g.dv, s, t, c.w, at))
        if const_expr(self.late):
            self.begin(c, s, at)
        if const_expr(self.whole.there):
            if not self.whole.holds(s.whole.found[None, at.scores]):
                mul_columns(c.s, s.total[None, at.scores])
        if const_expr(self.late):
            self.add_values(c, s, at)
            if const_expr(self.scored):
                self.make_outputs(c, g, s, at)

    @cute.jit
    def take_up(self, c, g, s, t, at):
        """Outputs, and the state behind the chunk."""
        if const_expr(not self.late):
            if const_expr(self.scored):
                self.scale_outputs(c, c.o, g, s, (at, 0))
                tk.mma_ABt(c.o, c.v, s.p[at.scores])
            self.delta.gradients_of_updates(c, s.delta, (at.scores, at.scores))
            self.add_values(c, s, at)
            self.delta.erase(c, s.delta, s.started[at.scores] if self.solved else None, at.scores)
            tk.mma_wait(1)
        self.put(g.o, s, t, c.x if self.late and self.scored else self.delta.result(c), at)
        if const_expr(self.delta.back):
            self.delta.times_beta(c, s.delta, at.scores)
            self.put(g.dv, s, t, c.w, at)
        tk.mma_wait(0)
        if const_expr(self.whole.there):
            mul_columns(c.s, self.whole.step(STEPS - 1, s.whole, at.scores))

    def make_outputs(self, c, g, s, at):
        """c.x = outputs, rounded, of half of the tokens at a time: fewer registers."""
        for half in range(2):
            tk.mm_ABt(c.half, c.s16, s.q[at.tokens], b_part=half)
            tk.mma_wait(0)
            self.scale_outputs(c, c.half, g, s, (at, half * CHUNK // 2))
            tk.mma_ABt(c.half, c.v, s.p[at.scores], b_part=half)
            tk.mma_wait(0)
            tk.copy(tk.columns(c.x, half * CHUNK // 2, CHUNK // 2), c.half)

    def add_values(self, c, s, at):
        """What the state takes up is under way."""
        if not self.whole.there:
            mul_columns(c.s, s.total[None, at.scores])
        tk.mma_AB(c.s, c.v, s.k[at.tokens])

    def begin(self, c, s, at):
        """The state as operands meet it, and the same, rounded."""
        if self.whole.there:
            mul_columns(c.s, self.whole.step(0, s.whole, at.scores))
        tk.copy(c.s16, c.s)

    def round(self, c, s, at):
        """As operands meet it, rounded, and the state as it was."""
        if self.whole.there:
            scaled_columns(c.s16, c.s, self.whole.step(0, s.whole, at.scores))
        else:
            tk.copy(c.s16, c.s)

    def updates(self, c, shared, stage, put):
        """As `Delta.updates`, of keys that have their decays, so that a token's value and what the state gives for its
        key have one factor."""
        if self.delta.forward:
            if self.spec.updates:
                tk.apply_narrow(c.v, lambda v, w: v - w, c.v, c.w)
            else:
                tk.load_shared_cols(c.beta, shared.beta[None, stage])
                if self.l2norm.there:
                    tk.load_shared_cols(c.erase, shared.erase[None, stage])
                    tk.apply_narrow(c.v, lambda v, w, b, e: e * v - b * w, c.v, c.w, c.beta, c.erase)
                else:
                    tk.apply_narrow(c.v, lambda v, w, b: b * (v - w), c.v, c.w, c.beta)
            tk.mm_ABt(c.w, c.v, shared.inverse[stage])
            tk.mma_wait(0)
            if self.spec.updates:
                put()
                tk.load_shared_cols(c.beta, shared.beta[None, stage])
                tk.mul_col(c.w, c.w, c.beta)
            tk.copy(c.v, c.w)

    @cute.jit
    def of_group(self, tiles: Constexpr, wg, f: Constexpr):
        """f of the tile that belongs to this warpgroup."""
        for i in cutlass.range_constexpr(len(tiles)):
            if wg == i:
                f(tiles[i])

    def put(self, to, s, t, x, at):
        """A chunk's outputs."""
        put(to, s.o, x, (t.batch, t.head, at.chunk, t.part), OUT_BARRIER, at.wg)
