"""dK and dV of heads of more than 128 columns, with the user's functions."""
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.attention.backward.dkv_hdim256 import P_BITS, DkvHdim256
from tkq.attention.backward.ds import stats_of
from tkq.attention.flex.backward.scores import FlexScores, Place


class FlexDkvHdim256(DkvHdim256):
    """``DkvHdim256``, with P = exp(score(scale * S) - lse) where the mask holds, and dS = P * d score * (dP + delta).

    Where d score is 1, the warpgroup with dV hands over P, as there. Otherwise P * d score in fp32, of any size, as it
    is made; dS is made of it as it is read."""

    def __init__(self, graphs, config, tiles, scheduler):
        """graphs: the spec."""
        super().__init__(graphs.attention, config, tiles, scheduler)
        self.scores, self.weighted = FlexScores(graphs, config), graphs.joint is not None
        self.fp16_p = self.fp16_p and not self.weighted
        if config.p_bytes != (4 if self.weighted else 2):
            raise NotImplementedError(f"{config}: P in {config.p_bytes} bytes, a score's slope takes 4, all else 2")

    # ---- the dV warpgroup ------------------------------------------------------------------------

    @cute.jit
    def visit_dv(self, g, s, t, c):
        """``dv_step`` takes with a tile's place what the functions take of its head."""
        for h in cutlass.range(g.heads_per_kv, unroll=1):
            step = self.step_of(self.scores.of_head(g, t, self.scheduler.query_head(g, t, h)))
            self.scheduler.visit_head(g, s, t, c, h, step)

    def step_of(self, emitted):
        return lambda g, s, t, c, m, masked: self.dv_step(g, s, t, c, (*m, emitted), masked)

    def of_step(self, c):
        """Tiles that the loop does not carry: scores are written, by tanh."""
        tile, p = self.config.tile, tk.rt(self.config.tile, self.tiles.q.dtype)
        return replace(c, s=tk.rt_fl(tile), p=p, slope=tk.rt_hf(tile) if self.fp16_p else p)

    def look(self, g, t, m):
        return self.scores.look(g, Place(t, 0, *m))

    def make_p(self, g, s, t, c, m, seen):
        at = Place(t, 0, *m)
        if self.weighted:
            self.scores.take_tanh(g, at, c.s)
            lse = stats_of(s, c.ring, 0, self.config.tile)
            s.p_pipe.acquire_empty(c.p_ring)
            self.scores.p_and_weights(g, at, c.s, (c.p, self.weights_into(s, c)), lse, seen)
            s.p_pipe.commit(c.p_ring)
            c.p_ring.advance()
            return
        lse = stats_of(s, c.ring, 0, self.config.tile)
        if self.fp16_p:
            tk.add(lse, lse, float(P_BITS))
        p = tk.rt_fl(self.config.tile)
        self.scores.p_fp32(g, at, c.s, p, lse, seen)
        tk.copy(c.p, p)
        if self.fp16_p:
            tk.copy(c.slope, p)

    def weights_into(self, s, c):
        """(number of a thread's element, weight) -> to shared memory, four at a time: there are no registers for all
        of a tile's."""
        four = cute.make_rmem_tensor((4,), Float32)

        def keep(i, weight):
            four[i % 4] = weight
            if i % 4 == 3:
                to = s.p[None, tk.thread_in_warpgroup(), i // 4, c.p_ring.stage]
                cute.autovec_copy(cute.recast_tensor(four, Int32), to)

        return keep

    def give_p(self, s, c):
        """Weights are there already."""
        if not self.weighted:
            super().give_p(s, c)

    # ---- the dK warpgroup ------------------------------------------------------------------------

    @cute.jit
    def visit_dk(self, g, s, t, c):
        for _ in cutlass.range(t.end, unroll=1):
            self.dk_step(g, s, t, c)

    def take_p(self, s, c):
        """Of weights later."""
        if not self.weighted:
            super().take_p(s, c)

    def make_ds(self, s, c, delta):
        if not self.weighted:
            super().make_ds(s, c, delta)
            return
        weights = tk.rt_fl(self.config.tile)
        self.hand_over(weights, s.p, c.p_ring, True)
        tk.apply_narrow(c.ds, self.scores.ds_of_weight, weights, c.dp, delta)

    def clear_dead_keys(self, t, ds):
        self.scores.clear_dead_keys(t, 0, ds)
