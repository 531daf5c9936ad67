"""dK and dV of heads of up to 128 columns, with the user's functions."""
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.attention.backward.dkv import Dkv
from tkq.attention.backward.ds import stats_of
from tkq.attention.flex.backward.scores import FlexScores, Place, places
from tkq.attention.flex.look import chosen


class FlexDkv(Dkv):
    """``Dkv``, with P = exp(score(scale * S) - lse) where the mask holds, and dS = P * d score * (dP + delta).

    Where d score is 1, the steps are ``Dkv``'s. Otherwise P as an operand and P * d score in fp32 are made of S alone,
    and dS of the latter and dP, rounded once. dP comes part by part (``dkv_parts``), as there are no registers for all
    of it."""

    def __init__(self, graphs, config, tiles, scheduler):
        """graphs: the spec."""
        super().__init__(graphs.attention, config, tiles, scheduler)
        self.graphs, self.scores = graphs, FlexScores(graphs, config)

    @cute.jit
    def visit(self, g, s, t, c):
        """``step`` takes with a tile's place what the functions take of its head."""
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            step = self.step_of(self.scores.of_head(g, t, self.scheduler.query_head(g, t, h)))
            self.scheduler.visit_head(g, s, t, c, h, step)

    def step_of(self, emitted):
        return lambda g, s, t, c, m, masked: self.step(g, s, t, c, (*m, emitted), masked)

    def step(self, *args):
        return (self.fp32_step if self.graphs.joint is None else self.joint_step)(*args)

    @cute.jit
    def joint_step(self, g, s, t, c, m, masked: Constexpr[bool]):
        tile, dtype, stage, parts = self.config.tile, self.tiles.q.dtype, c.ring.stage, self.config.dkv_parts
        of = replace(c, s=tk.rt_fl(tile), p=tk.rt(tile, dtype), ds=tk.rt(tile, dtype))
        s.q_pipe.wait(c.ring)
        c.ping_pong.take()
        tk.mm_ABt(of.s, s.k[c.wg], s.q[stage])
        seen, weights = self.look(g, t, of, m) if masked else None, tk.rt_fl(tile)
        tk.mma_wait(0)
        at = Place(t, c.wg, *m)
        self.scores.take_tanh(g, at, of.s)
        self.scores.p_and_weights(g, at, of.s, (of.p, weights.tensor.__setitem__), stats_of(s, c.ring, 0, tile), seen)
        c.ping_pong.give()
        s.do_pipe.wait(c.ring)
        for i in cutlass.range_constexpr(parts):
            dp, (first, end) = tk.rt_fl(tile // parts), self.part(i)
            tk.mm_ABt(dp, s.v[c.wg], s.do[stage], b_part=i)
            if const_expr(i == 0):
                tk.mma_AB(of.dv, of.p, s.do[stage])
            else:
                tk.mma_AB(of.dk, of.ds, s.q[stage], k=self.part(i - 1))
            tk.mma_wait(1)  # dP, and dV behind the first
            self.make_ds_of_weights(s, replace(of, dp=dp), weights, (first, end - first))
        self.add_last_ds(s, t, of, self.part(parts - 1))

    def make_ds_of_weights(self, s, c, weights, which):
        """Of some columns."""
        tk.apply_narrow(tk.columns(c.ds, *which), self.scores.ds_of_weight, tk.columns(weights, *which), c.dp,
                        stats_of(s, c.ring, 1, self.config.tile, *which))

    def make_p_fp32(self, g, t, c, m, p, lse):
        self.scores.p_fp32(g, Place(t, c.wg, *m), c.s, p, lse)

    def make_part(self, s, c, p, limits, which):
        """limits: what is seen, where the tile is masked."""
        def element(p, dp, delta, at):
            e = chosen(limits[0], at[0], at[1], p, 0.0) if limits else p
            return e, e * (dp + delta)

        delta = stats_of(s, c.ring, 1, self.config.tile, *which)
        self.apply(c, which, element, tk.columns(p, *which), tk.columns(c.dp, *which), delta)

    def apply(self, c, which, element, *operands):
        """P and dS of some columns as operands: ``element(.., (r, j, column))`` gives both."""
        found = places(*which)
        to = tuple(tk.columns(x, *which) for x in (c.p, c.ds))
        tk.apply_narrow(to, lambda *of: element(*of, next(found)), *operands)
        assert next(found, None) is None, "an element for each of a thread's"

    def look(self, g, t, c, m):
        return self.scores.look(g, Place(t, c.wg, *m))

    def limits(self, g, t, c, m, seen):
        return seen,

    def clear_dead_keys(self, t, c, ds):
        self.scores.clear_dead_keys(t, c.wg, ds)
