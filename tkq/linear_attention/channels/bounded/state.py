"""The state of Kimi's delta rule with bounded gates, in the accumulators of warpgroups, block by block."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, const_expr

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import EDGE, PANEL, rest_of
from tkq.linear_attention.channels.bounded.config import COLUMNS
from tkq.linear_attention.channels.columns import mul_columns
from tkq.linear_attention.channels.parts import OUT_BARRIER, chunks
from tkq.linear_attention.config import CHUNK

BLOCKS = CHUNK // EDGE


@dataclass(frozen=True)
class Held:
    """Registers of 64 rows of V. Of v and again there is one block at a time."""

    s: tk.RegTile  # the state, transposed: V by K
    s16: tk.RegTile  # half of its columns, rounded: an operand
    v: tk.RegTile  # values, transposed, then what is written
    again: tk.RegTile  # the same, for the inverse's second part
    both: tk.RegTile  # what the state gives for keys and for queries
    given: tk.RegTile  # what is written
    some: tk.RegTile  # outputs
    few: tk.ColVec  # factors of a block's tokens
    more: tk.ColVec


class BoundedState:
    """Of each block, with S as it is in the block's middle, a and b as `channels.l2norm` has them, and rows that have
    their factors:

        U = (I + L)^-1 (b beta V - b^2 beta f K S),  O = a scale f Q S + P U,  S += (K / f)' U

    and from block to block S is multiplied by what lies between two middles (steps). The inverse is an operand in two
    parts. A block's values are read, and its outputs written, when they are needed: there are no registers for more."""

    def __init__(self, spec: Any, parts: Any, piece: int):
        """parts: the kernel's `Sequences`, `QkTiles` and `OverlappingSegments`."""
        self.spec, self.piece = spec, piece
        self.sequences, self.qk_tiles, self.overlap = parts

    def registers(self) -> Held:
        """Room for them."""
        return Held(tk.rt_fl(COLUMNS), tk.rt(PANEL, BFloat16), *[tk.rt(CHUNK, BFloat16) for _ in range(2)],
                    tk.rt_fl(2 * EDGE), *[tk.rt_fl(EDGE) for _ in range(2)], *[tk.cv(EDGE) for _ in range(2)])

    @cute.jit
    def keep(self, g, s, t, of):
        """All chunks of a block, by the wg-th of the state's warpgroups. of: the segment, wg."""
        segment, wg = of
        span = self.overlap.of_block(g, t, segment, chunks(self.spec, g, t))
        c, row0, leader = self.registers(), (t.part + wg) * CHUNK, tk.warp_id() % 4 == 0
        ring = s.tokens.ring()  # of what is made of them, too
        self.begin(c, g, t, span, row0)
        for chunk in cutlass.range(span.first, span.end, unroll=1):
            s.tokens.wait(ring)
            s.scores.wait(ring)
            if leader:
                tk.store_wait()  # outputs of the chunk before
            tk.sync(OUT_BARRIER + wg, tk.WARPGROUP)
            tk.mma_wait(0)  # nothing is under way: ptxas, which forgets it in a loop, would wait at the next use of c.s
            for block in cutlass.range_constexpr(BLOCKS):
                self.add(c, s, block, (ring.stage, wg))
            mul_columns(c.s, self.step(s, BLOCKS, ring.stage))
            tk.publish()
            tk.sync(OUT_BARRIER + wg, tk.WARPGROUP)
            if self.overlap.stores(leader, span, chunk):
                tk.store_async(g.o, s.o[wg], (t.batch, t.head, chunk, t.part + wg))
            s.tokens.release(ring)
            s.scores.release(ring)
            ring.advance()
        if const_expr(self.spec.final is not None):
            self.end(c, g, t, span, row0)
        tk.store_wait(read=False)

    @cute.jit
    def begin(self, c, g, t, span, row0):
        """The first state; zeros in front of a segment."""
        if const_expr(self.spec.initial is None or self.overlap.there):
            tk.zero(c.s)
        if const_expr(self.spec.initial is not None):
            if const_expr(self.overlap.there):
                if span.first == 0:
                    tk.load_from(c.s, self.sequences.state(g.initial, t), row0, 0)
            else:
                tk.load_from(c.s, self.sequences.state(g.initial, t), row0, 0)

    @cute.jit
    def end(self, c, g, t, span, row0):
        """The last state, by the block that has the last chunk."""
        if const_expr(self.overlap.there):
            if span.end == chunks(self.spec, g, t) and span.first < span.end:
                tk.store_elements(self.sequences.state(g.final, t), c.s, row0, 0)
        else:
            tk.store_elements(self.sequences.state(g.final, t), c.s, row0, 0)

    def add(self, c, s, block, at):
        """A block's outputs, and the state behind it. at: the stage, the warpgroup."""
        (stage, wg), there, rest = at, (block * EDGE, EDGE), rest_of(block)
        inside, v = dict(b_part=block, k=(block * EDGE, block * EDGE + EDGE)), tk.columns(c.v, *there)
        tk.load_T(v, rows_of(s.v[stage * s.o.stages + wg], block))
        self.meet(c, s, block, stage)
        self.load(c.few, s.delta.beta, block, stage)
        self.load(c.more, s.delta.erase, block, stage)
        tk.mma_wait(0)
        tk.apply_narrow(v, lambda v, w, b, e: e * v - b * w, v, tk.columns(c.both, 0, EDGE), c.few, c.more)
        tk.copy(tk.columns(c.again, *rest), v)
        tk.mm_ABt(c.given, c.v, s.delta.inverse[stage], **inside)
        tk.mma_ABt(c.given, c.again, s.delta.inverse[stage], b_part=block, k=(rest[0], sum(rest)))
        self.load(c.few, s.lengths.queries, block, stage)
        tk.mul_col(c.some, tk.columns(c.both, EDGE, EDGE), c.few)
        tk.mma_wait(0)
        tk.copy(v, c.given)
        tk.mma_AB(c.s, c.v, s.k[stage], k=inside["k"])
        tk.mma_ABt(c.some, c.v, s.p[stage], **inside)
        tk.mma_wait(0)
        tk.store_T(rows_of(s.o[wg], block), c.some)

    def meet(self, c, s, block, stage):
        """What the state gives for keys and queries is under way, some columns at a time."""
        step, multiply = self.step(s, block, stage), tk.mm_ABt
        for first in range(0, COLUMNS, self.piece):
            of, (panel, k) = tk.columns(c.s, first, self.piece), divmod(first, PANEL)
            mul_columns(of, cute.make_tensor(step.iterator + first, cute.make_layout(self.piece)))
            if panel:
                tk.mma_wait(PANEL // self.piece - 1)  # the registers of the columns before are free
            tk.copy(tk.columns(c.s16, k, self.piece), of)
            multiply(c.both, c.s16, self.qk_tiles.both(s.qk_tiles, stage, block, panel), k=(k, k + self.piece))
            multiply = tk.mma_ABt

    def step(self, s, n, stage) -> cute.Tensor:
        """What each column is multiplied by in front of the n-th block, or behind the last."""
        return cute.make_tensor(s.whole.steps[None, stage].iterator + n * COLUMNS, cute.make_layout(COLUMNS))

    def load(self, to: tk.ColVec, factors, block, stage):
        """Those of a block's tokens."""
        tk.load_shared_cols(to, cute.make_tensor(factors[None, stage].iterator + block * EDGE, cute.make_layout(EDGE)))


def rows_of(tile: tk.SharedTile, block) -> tk.SharedTile:
    """Those of a block's tokens, of 64 x 64."""
    staged = cute.local_tile(tile.staged, (EDGE, CHUNK, tile.stages), (block, 0, 0))
    return tk.SharedTile(staged, tk.st(EDGE, CHUNK, tile.type.dtype), tile.stage)
