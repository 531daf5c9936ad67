"""P of a tile of transposed scores, and the slope beside it, from the user's functions."""
import itertools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

import tkq.tile as tk
from tkq.attention.backward.dkv import Dkv
from tkq.attention.backward.ds import slope, stats_of
from tkq.attention.flex.emit import Emitted, select
from tkq.attention.flex.look import ALL, Look, all_seen, chosen

LARGEST = 3e38  # a score above it would make NaN of a row's -inf
ABSENT, MASKED = 0, 1  # states of a block; others are full


class FlexDkv(Dkv):
    """``Dkv``, with P = exp(score(scale * S) - lse) where the mask holds, and slope = P * d score."""

    def __init__(self, graphs, config, tiles, scheduler):
        """graphs: the spec."""
        super().__init__(graphs.attention, config, tiles, scheduler)
        self.by_slope = True
        self.graphs, self.look_at = graphs, Look(graphs.mask, "q")

    @cute.jit
    def make_p(self, g, s, t, c, m, masked: cutlass.Constexpr):
        m = m[0], cute.arch.make_warp_uniform(m[1])
        self.probabilities(g, t, c, m, stats_of(s, c.ring, 0, self.config.tile), masked)
        alive = t.rows_k - (t.block * self.config.block + c.wg * 64)
        alive = cutlass.select_(m[1] < g.tiles, alive, Int32(0))  # see ``FlexScheduler.each_tile``
        if alive < 64:
            self.clear_dead_keys(c, alive)

    def probabilities(self, g, t, c, m, lse, masked):
        of, (head, tile) = self.graphs, m
        places = self.places(t, c, head, tile)
        score, derivative = (None if graph is None else Emitted(graph, captured) for graph, captured in (
            (of.score, g.score), (of.slope, g.slope)))
        seen = self.look(g, t, c, m) if masked else None
        order, n = itertools.count(), self.config.tile  # elements come in the tile's order

        def element(x, lse, col):
            i = next(order)
            r, j = i // 2 % 2, i // 4 * 2 + i % 2
            scaled = {**places(r, col), "score": (x * g.scale, (r, col))}
            if score is not None:
                x = score.at(**scaled)
                x = select(x < Float32(LARGEST), x, Float32(LARGEST)) if of.score.tensors else x
            factor = g.scores.outer if score is None else Float32(tk.LOG2E)
            e = cute.math.exp2(cute.math.fma(x, factor, lse), fastmath=True)
            e = chosen(seen, r, j, e, 0.0) if masked else e
            if derivative is None:
                return e
            return e, select(e == Float32(0.0), Float32(0.0), e * derivative.at(**scaled))

        to = c.p if of.slope is None else (c.p, slope(self.spec, c))
        tk.apply_narrow(to, element, c.s, lse, tk.COLUMN)
        assert next(order) == n // 2, "an element for each of a thread's"

    def look(self, g, t, c, m):
        """Two words: which of a tile's queries the thread's keys are seen by."""
        seen, (head, tile) = cute.make_rmem_tensor((2,), Uint32), m
        if self.graphs.mask is None:
            all_seen(seen)
        else:
            places = self.places(t, c, head, tile)(0, 0)
            self.look_at.look(g.mask, {name: places[name] for name in ("b", "h")}, (places["kv"][0], places["q"][0]),
                              self.config.tile, seen)
        if self.graphs.states:
            state = g.states[t.batch_k, head, g.row_block(tile), 2 * t.block + c.wg]
            for r in range(2):
                seen[r] = select(state == ABSENT, Uint32(0), select(state == MASKED, seen[r], Uint32(ALL)))
        return seen

    def places(self, t, c, head, tile):
        """(row, column of a thread's) -> inputs of the graphs: rows are keys, columns queries."""
        key = t.block * self.config.block + c.wg * 64 + tk.first_row()
        query = tile * self.config.tile + tk.first_col()
        return lambda r, col: dict(b=(t.batch_k, 0), h=(head, 0), q=(query, col), kv=(key, 8 * r))

    def clear_dead_keys(self, c, alive):
        """P of keys behind the last one is 0, whatever the functions make of their scores."""
        for x in (c.p,) if self.graphs.slope is None else (c.p, slope(self.spec, c)):
            words = cute.recast_tensor(x.tensor, Int32)
            for i in range(cute.size(words)):
                row = tk.first_row() + 8 * (i % 2)
                words[i] = Int32(cutlass.select_(row < alive, words[i], Int32(0)))
