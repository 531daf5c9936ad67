"""The state of the gated delta rule's gradients, from the last token to the first, in the accumulators of warpgroups,
block by block."""
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import EDGE, PANEL, rest_of
from tkq.linear_attention.blocks.qk_tiles import BLOCKS, QkTiles
from tkq.linear_attention.blocks.state import OUT_BARRIER, factors_of, first_state, meet
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.delta import is_large, sign_of
from tkq.linear_attention.engine.dots import write_dots
from tkq.linear_attention.engine.segmented import Segmented, visited
from tkq.linear_attention.outputs import ready
from tkq.tile.dtypes import element_type
from tkq.tile.maps import element


@dataclass(frozen=True)
class Held:
    """Registers of 64 rows of V."""

    s: tk.RegTile  # the state, transposed: V by K
    s16: tk.RegTile  # the same, rounded: an operand
    v: tk.RegTile  # outputs' gradients of a chunk, transposed, then with what decays to their block's start
    u: tk.RegTile  # of a block: O times beta, where both parts of the inverse are met; then dV
    given: tk.RegTile  # of a block: what the state gives for keys, then dV
    some: tk.RegTile  # of a block: O, then dU
    taken: tk.RegTile  # of a block: dV, as it is taken off the state
    x: tk.RegTile  # of a block: what the forward has kept
    few: tk.ColVec  # factors of a block's tokens
    more: tk.ColVec


class BlockGradients:
    """Of each block, from the last one to the first, as `engine.delta` has it of chunks, with the state over the scale:

        O = scale (e^(G[15] - G) K D + P dO),  dV = (I + M)^-1' beta O,  dU = O - N' dV
        D = e^G[15] D + (e^G dO)' Q - (e^G / scale dV)' K

    and of each token the sum of dU times R, by what was kept; of segments' states without dU. The inverse is an operand
    in two parts (see `pairs.put_two`)."""

    def __init__(self, spec: Any, sequences: Any, qk_tiles: QkTiles, piece: int):
        self.qk_tiles, self.segmented = qk_tiles, Segmented(spec)
        self.spec, self.sequences, self.piece, self.gated = spec, sequences, piece, spec.gate != "none"

    def registers(self) -> Held:
        """Room for them."""
        K, dtype = self.spec.head_dim, element_type(self.spec.dtype)
        return Held(tk.rt_fl(K), tk.rt(K, dtype), *[tk.rt(CHUNK, dtype) for _ in range(2)],
                    *[tk.rt_fl(EDGE) for _ in range(2)], *[tk.rt(EDGE, dtype) for _ in range(2)],
                    *[tk.cv(EDGE) for _ in range(2)])

    @cute.jit
    def keep(self, g, s, t, wg):
        """All chunks of a task, by the wg-th of the state's warpgroups."""
        c, row0 = self.registers(), (t.part + wg) * CHUNK
        ring, scores = s.tokens.ring(), s.scores.ring()
        first_state(self, g, t, c.s, row0)
        for i in cutlass.range(t.chunks, unroll=1):
            chunk = visited(t, i, True)
            s.tokens.wait(ring)
            s.scores.wait(scores)
            for n in cutlass.range_constexpr(len(s.v)):
                if wg == n:
                    tk.load_T(c.v, s.v[n][ring.stage])
            tk.mma_wait(0)  # nothing is under way: ptxas, which forgets it in a loop, would wait at each use of c.s
            for block in cutlass.range_constexpr(BLOCKS):
                self.add(c, s, (BLOCKS - 1 - block, wg), (ring.stage, scores.stage))
            if const_expr(self.spec.writes):
                tk.publish()
                write_dots(g, s.dots, t, chunk, (wg, OUT_BARRIER + wg))  # behind a barrier
                if tk.warp_id() % 4 == 0:
                    tk.store_async(g.o, s.pieces.stacked(BLOCKS)[wg], (t.batch, t.head, chunk, t.part + wg))
            s.tokens.release(ring)
            s.scores.release(scores)
            ring.advance()
            scores.advance()
        if const_expr(self.spec.final is not None):
            if self.segmented.stores(g, t):
                tk.store_elements(self.sequences.state(g.final, t), c.s, row0, 0)
        tk.store_wait(read=False)

    def add(self, c, s, at, stages):
        """A block's gradients, and the state before it. at: the block, the warpgroup. stages: of tokens and of
        scores."""
        (block, wg), (tokens, scores), of = at, stages, s.factors
        there, rest = (block * EDGE, EDGE), rest_of(block)
        inside = dict(k=(block * EDGE, (block + 1) * EDGE))
        values, between = tk.columns(c.v, *there), tk.columns(c.u, *there)
        self.outputs(c, s, block, stages)
        if self.spec.writes and block == BLOCKS - 1:
            ready(OUT_BARRIER + wg)
        factors_of(c.more, of.beta, block, scores)
        tk.apply_narrow(between, lambda o, b: o * b, c.some, c.more)
        tk.copy(tk.columns(c.u, *rest), between)
        tk.mm_ABt(c.given, c.u, s.inverse[scores], b_part=block, **inside)
        tk.mma_ABt(c.given, c.u, s.inverse[scores], b_part=block, k=(rest[0], sum(rest)))
        if self.gated:
            factors_of(c.few, of.to_end, block, scores)
            tk.apply_narrow(values, lambda v, f: v * f, values, c.few)
        for panel in range(self.qk_tiles.panels):
            queries = self.qk_tiles.queries(s.qk_tiles, tokens, block, panel)
            tk.mma_AB(tk.columns(c.s, panel * PANEL, PANEL), values, queries)
        factors_of(c.few, of.erase, block, scores)
        tk.mma_wait(self.qk_tiles.panels)
        tk.copy(between, c.given)
        tk.apply_narrow(c.taken, lambda d, e: -(e * d), c.given, c.few)
        if self.spec.writes:
            tk.mma_ABt(c.some, c.u, s.keys[scores], b_part=block, **inside)
        for panel in range(self.qk_tiles.panels):
            keys = self.qk_tiles.keys(s.qk_tiles, tokens, block, panel)
            tk.mma_AB(tk.columns(c.s, panel * PANEL, PANEL), c.taken, keys)
        if self.spec.writes:
            tk.store_T(s.pieces[wg * BLOCKS + block], between)
            tk.load_T(c.x, s.x[(tokens * len(s.v) + wg) * BLOCKS + block])
            tk.mma_wait(self.qk_tiles.panels)
            self.add_dots(c, s.dots, block, wg)
        tk.mma_wait(0)

    def outputs(self, c, s, block, stages):
        """c.some = O; the state has decayed."""
        tokens, scores = stages
        tk.mm_ABt(c.some, c.v, s.p[scores], b_part=block, k=(block * EDGE, (block + 1) * EDGE))
        meet(self, c, c.given, lambda panel: self.qk_tiles.keys(s.qk_tiles, tokens, block, panel))
        factors_of(c.few, s.factors.at_query, block, scores)
        if self.gated:
            tk.mul(c.s, c.s, s.factors.total[block, scores])
        tk.mma_wait(0)
        tk.mul_col(c.given, c.given, c.few)
        tk.add(c.some, c.some, c.given)

    @cute.jit
    def add_dots(self, c, dots: cute.Tensor, block: Constexpr[int], wg):
        """The block's sums over a warp's 16 rows, to shared memory: of what was kept times dU, or times dV over beta^2.
        c.more: beta. Of the eight lanes that share columns each ends with the sum of one in four."""
        mine = []
        for j in cutlass.range_constexpr(EDGE // 4):
            b, i = c.more.tensor[j], j // 2 * 4 + j % 2
            large = is_large(b)
            by = cutlass.select_(large, cute.arch.rcp_approx(b * b), sign_of(b))
            of_rows = [cutlass.select_(large, c.given.tensor[i + r], c.some.tensor[i + r]) * element(c.x, i + r)
                       for r in (0, 2)]
            mine.append((of_rows[0] + of_rows[1]) * by)
        quad = tk.lane_id() // 4
        for bit in (2, 1):
            upper = quad & bit != 0
            mine = [cutlass.select_(upper, mine[bit + i], mine[i]) + cute.arch.shuffle_sync_bfly(
                cutlass.select_(upper, mine[i], mine[bit + i]), offset=4 * bit) for i in range(bit)]
        total = mine[0] + cute.arch.shuffle_sync_bfly(mine[0], offset=16)
        token = block * EDGE + tk.first_col() + 8 * (quad % 4 // 2) + quad % 2
        dots[token, 4 * wg + tk.warp_id() % 4] = Float32(total)
