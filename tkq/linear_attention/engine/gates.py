"""How a state decays: the part of `LinearAttention` that knows of gates."""
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine import ahead
from tkq.linear_attention.engine.delta import of_kept
from tkq.linear_attention.engine.heads import ONE, Heads
from tkq.linear_attention.engine.second import second_factor
from tkq.linear_attention.spec import NARROW, LinearSpec
from tkq.tile.dtypes import element_type
from tkq.tile.maps import element

LOWEST = -150.0  # of a gate, as a power of 2: such a factor is 0 in fp32, and sums of it keep their last bits


class GateShared(NamedTuple):
    """Of a chunk's 64 tokens, a place for each stage of scores and head, G in powers of 2. sum: G. at_query: scale *
    2^G. to_end: 2^(G[63] - G); the other way around in the reversed order. total: 2^G[63]. dt: with Mamba-2's steps d,
    scale * d, and to_end is multiplied by d; reversed it is d alone. second: see `second.second_factor`. kept: G, less
    the logarithms of what makes corrected values of kept ones (see `Gate`)."""

    sum: cute.Tensor
    at_query: cute.Tensor
    to_end: cute.Tensor
    total: cute.Tensor
    dt: Optional[cute.Tensor]
    second: Optional[cute.Tensor]
    kept: Optional[cute.Tensor]


class Gate:
    """No gate, or one number a token and head: the same for all of K, so that a chunk's decay is a factor for each
    pair of tokens, each token and the state as a whole. Factors are made of differences of sums: where gates are
    logarithms of decays, nothing overflows.

    Where keys, or in the reversed order queries, are what the delta rule's forward has kept (see
    `engine.delta.of_kept`), each has a factor from 0 to 1, as a decay of its own: in the scores as a part of the
    exponent, and where a state takes up a key, or gives a query, as a part of that factor. There need be no other
    gate."""

    def __init__(self, spec: LinearSpec, ssd: Any = None, heads: Heads = ONE, every: int = 1):
        """ssd: Mamba-2's part, which makes the gates there (see `engine.ssd.Ssd`); it has d, one more factor of a
        token. heads: of a block, each of which has a warp that makes its factors. every: how many chunks it goes on
        by."""
        self.heads, self.step = heads, -every if spec.reverse else every
        self.spec, self.gated, self.dtype = spec, spec.gated, element_type(spec.dtype)
        self.decays = spec.gate != "none"
        self.ssd = ssd if spec.ssd else None
        self.adds = spec.ssd is not None and not spec.reverse  # does a token add d times its value?
        self.kept = spec.kept is not None
        self.own_warps = self.gated and heads.count == 2 and not heads.all_warps  # for factors, beside the producer
        self.in_two = spec.exact and spec.head_dim <= NARROW  # are there registers for values in two parts at once?

    def shared(self, al: tk.SharedAllocator) -> Any:
        """Room for it in shared memory; None without a gate."""
        if not self.gated:
            return None
        stages = self.heads.places
        some = self.ssd, self.spec.second, self.kept
        return GateShared(*[al.vector(CHUNK, stages) for _ in range(3)], al.vector(4, stages),
                          *(al.vector(CHUNK, stages) if there else None for there in some))

    # ---- warps that make factors: of the scores, or beside the producer ------------------------

    def begin(self, g, t, chunk):
        """(this lane's numbers of the first chunk, None where other warps have them; row and column sums; with Mamba-2
        what columns are multiplied by; beta of what was kept)."""
        if not self.gated:
            return None
        mine, kept = (None, None) if self.own_warps else self.first(g, t, chunk)
        return mine, tk.rv(), tk.cv(CHUNK), tk.cv(CHUNK) if self.adds else None, kept

    def first(self, g, t, chunk):
        """A lane's numbers of the first chunk, which are on their way (see `ahead`): gates, beta of what was kept."""
        t, mine, kept = self.heads.of_warp(t), None, None
        if self.decays:
            mine = ahead.begin(self.numbers(g), g, t, chunk, self.step, heads=self.heads)
        if self.kept:
            kept = ahead.begin(g.beta, g, t, chunk, self.step, carried=False, heads=self.heads)
        return mine, kept

    def numbers(self, g) -> cute.Tensor:
        """(B, S, HO): logarithms of decays, with Mamba-2 its dt."""
        if self.ssd:
            return g.ssd.dt
        if self.spec.gate == "head":
            return cute.make_tensor(g.g.iterator, cute.make_layout((1, 1, g.g.shape[0]), stride=(0, 0, g.g.stride[0])))
        return g.g

    @cute.jit
    def factors(self, g, t, chunk, place, gates):
        """A chunk's to shared memory, by the scores' first warp, where factors have no warps of their own. place:
        (shared memory, the warp's stage)."""
        if const_expr(self.gated and not self.own_warps):
            if self.heads.makes_factors():
                self.sums(g, self.logs(g, self.heads.of_warp(t), chunk, (gates[0], gates[4])), *place)

    def logs(self, g, t, chunk, numbers):
        """Of this lane's tokens: gates in powers of 2; with Mamba-2 its d, too, or what kept ones are times."""
        gates, kept = numbers
        if self.ssd:
            return self.ssd.steps(g, t, chunk, gates.found)
        x = [gates.found[e] * tk.LOG2E for e in range(2)] if self.decays else [Float32(0.0)] * 2
        found = [cutlass.select_(y < LOWEST, Float32(LOWEST), y) for y in x]
        return found + [of_kept(Float32(kept.found[e])) for e in range(2)] if self.kept else found

    def ask(self, g, t, chunk, gates):
        """The gates of the chunk that follows are on their way, where factors have no warps of their own."""
        if self.gated and not self.own_warps:
            self.follow(g, t, chunk, (gates[0], gates[4]))

    def follow(self, g, t, chunk, numbers):
        """The numbers of the chunk that follows are on their way."""
        for mine in numbers:
            if mine is not None:
                ahead.follow(mine, g, self.heads.of_warp(t), chunk, self.heads)

    def sums_of(self, shared):
        """G, of each stage and head; None without gates."""
        return shared.sum if self.gated else None

    def between(self, shared, gates, stage):
        """Running sums of a chunk for rows and columns of P, behind a barrier; None without gates. Beside them, where
        tokens add d times their values, scale * d of the columns."""
        if not self.gated:
            return None
        _, rows, cols, steps, _ = gates
        of_rows = of_cols = shared.sum
        if self.kept:
            of_rows, of_cols = (shared.kept, shared.sum) if self.spec.reverse else (shared.sum, shared.kept)
        tk.load_rows(rows, of_rows[None, stage], 0, CHUNK)
        tk.load_shared_cols(cols, of_cols[None, stage])
        if self.adds:
            tk.load_shared_cols(steps, shared.dt[None, stage])
            return rows, cols, steps
        return rows, cols

    @cute.jit
    def sums(self, g, logs: Any, shared, stage):
        lane = tk.lane_id()
        both = logs[0] + logs[1]
        total = both
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(total, offset=1 << i, mask_and_clamp=0)
            if lane >= 1 << i:
                total = total + other
        before = total - both
        last = cute.arch.shuffle_sync(total, 31)
        for e in cutlass.range_constexpr(2):
            x = total if const_expr(e == 1) else before + logs[0]
            i = 2 * lane + e
            shared.sum[i, stage] = x
            begun = cute.math.exp2(x, fastmath=True)
            left = cute.math.exp2(last - x, fastmath=True)
            if const_expr(self.spec.reverse):
                begun, left = left, begun
            if const_expr(self.spec.second is not None):
                shared.second[i, stage] = second_factor(self.spec, begun, left, g.scale)
            if const_expr(self.kept):
                shared.kept[i, stage] = x - cute.math.log2(logs[2 + e], fastmath=True)
                if const_expr(self.spec.reverse):
                    begun = begun * logs[2 + e]
                else:
                    left = left * logs[2 + e]
            shared.at_query[i, stage] = g.scale * begun
            if const_expr(self.ssd is not None):
                shared.dt[i, stage] = logs[2 + e] * g.scale if const_expr(self.adds) else logs[2 + e]
                left = left * logs[2 + e] if const_expr(self.adds) else left
            shared.to_end[i, stage] = left
        if lane == 0:
            shared.total[0, stage] = cute.math.exp2(last, fastmath=True)

    def weigh(self, p, x, between, scale, apply=tk.apply_narrow):
        """p = x times scale and the decay from each key to each query; where `weigh_rest` follows, x is that, too.
        apply: which of p's elements are made, `tk.apply_narrow` or another."""
        if between is None:
            apply(p, lambda s: s * scale, x)
            return
        weights = self.weights(between, scale)
        if not self.spec.exact_scores:
            apply(p, lambda s, i, j, f: s * f * cute.math.exp2(i - j, fastmath=True), x, *weights)
            return
        for at in range(cute.size(x.tensor)):
            i, j, f = (element(w, at) for w in weights)
            x.tensor[at] = x.tensor[at] * f * cute.math.exp2(i - j, fastmath=True)
        tk.copy(p, x)

    def weights(self, between, scale):
        """Of P's elements: the sums whose difference is the decay, and a factor."""
        if self.adds:
            return between
        return *(reversed(between) if self.spec.reverse else between), scale

    def weigh_rest(self, p, x):
        """p = what `weigh` rounded off."""
        tk.apply_narrow(p, lambda s, p: s - p, x, p)

    # ---- the state's warpgroups ----------------------------------------------------------------

    def at_query(self, c, shared, stage, scale):
        """What the state gave, as each query sees it."""
        if self.gated:
            tk.load_shared_cols(c.at_query, shared.at_query[None, stage])
            tk.mul_col(c.o, c.o, c.at_query)
        else:
            tk.mul(c.o, c.o, scale)

    def take_up(self, c, shared, stage):
        """The values as they are at the chunk's end."""
        if self.gated:
            tk.load_shared_cols(c.to_end, shared.to_end[None, stage])
            tk.apply_narrow(c.u, lambda v, f: v * f, self.taken_up(c), c.to_end)
            if self.in_two:
                tk.apply_narrow(c.rest, lambda v, f, u: v * f - u, c.v, c.to_end, c.u)

    def decay(self, c, shared, stage):
        """The state to the chunk's end."""
        if self.gated:
            tk.mul(c.s, c.s, shared.total[0, stage])

    def taken_up(self, c):
        """What a state takes up, before it decays."""
        return c.w if self.spec.delta and not self.spec.reverse else c.v

    def rest_of_values(self, c, shared, stage):
        """c.u = what `take_up` rounded off."""
        tk.load_shared_cols(c.to_end, shared.to_end[None, stage])
        tk.apply_narrow(c.u, lambda v, f, u: v * f - u, c.v, c.to_end, c.u)

    def values(self, c):
        """Those that the state takes up, in one part or two."""
        return [c.u if self.gated else c.v] + [c.rest] * self.in_two
