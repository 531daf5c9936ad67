"""Second operands of a launch: two linear attentions that share a state are computed in one."""
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.spec import LinearSpec


class SecondShared(NamedTuple):
    """of_keys: queries, or keys, of each stage of tokens. v: values, p: scores, as the first ones."""

    of_keys: tk.SharedTile
    v: Any
    p: Any


class Second:
    """With a second query q2 of each token there is a second output; neither its own token's key is seen, nor is it
    scaled; sums of outputs times other tensors are of o times x, less o2 times v:

        O2 = e^G Q2 S + P2 V,  P2[i, j] = e^(G[i] - G[j]) q2[i] k[j] for j < i

    With a second pair k2, v2 a state takes up both, and the second is taken off: the token itself is not seen, and
    sums are of o times v2. So that one factor is that of the whole state, the second is divided by the scale:

        O = scale * (e^G Q S + P V) - P2 V2,  P2[i, j] = e^(G[i] - G[j]) q[i] k2[j] for j < i
        S = e^G[63] S + (e^(G[63] - G) K)' V - (e^(G[63] - G) / scale K2)' V2

    Reversed likewise. With sums scores are used both ways (see `both_ways.BothWays`), and a launch with a second
    key and value has none."""

    def __init__(self, spec: LinearSpec, gate: Any):
        self.spec, self.gate, self.there = spec, gate, spec.second is not None
        self.query, self.pair = spec.second == "query", spec.second == "pair"
        self.sign = -1.0 if self.pair or spec.both_ways else 1.0

    def shared(self, al: tk.SharedAllocator, tiles, config) -> Any:
        """Room for it; None without. tiles: of queries and keys, of values, of scores."""
        if not self.there:
            return None
        of_keys, of_values, p = tiles
        return SecondShared(al.tile(of_keys, config.stages),
                            al.tile(of_values, config.stages * config.groups) if self.pair else None,
                            al.tile(p, 2) if self.spec.scored else None)

    def tokens_of(self, g, s, t, place):
        """What the producer loads of a chunk, of queries or keys. place: (stage, chunk)."""
        if not self.there:
            return []
        return [(s.second.of_keys[place[0]], g.q2 if self.query else g.k2, (t.batch, t.head_k, place[1], 0))]

    def values_of(self, g, s, t, place):
        """Likewise, of values. place: (tile, chunk, the state's warpgroup)."""
        tile, chunk, wg = place
        return [(s.second.v[tile], g.v2, (t.batch, t.head_v, chunk, t.part + wg))] if self.pair else []

    # ---- the scores' warpgroup -----------------------------------------------------------------

    def put(self, s, x, p, gates, places, put_scores):
        """The second scores, by way of x and p. places: stages of tokens and of factors."""
        if not self.there:
            return
        mine, stage = s.second.of_keys[places[0]], places[0]
        tk.mm_ABt(x, *((mine, s.k[stage]) if self.query else (s.q[stage], mine)))
        between = self.gate.between(s.gate, gates, places[1])  # again: decays of all pairs would be too many registers
        tk.mma_wait(0)
        self.gate.weigh(p, x, between, self.sign)
        put_scores(s.second.p[places[1]], p, 1)

    # ---- the state's warpgroups ----------------------------------------------------------------

    def begin(self) -> Any:
        """Registers: the second values as the state takes them up, in one part or two."""
        return [tk.rt(CHUNK, self.gate.dtype) for _ in range(1 + self.gate.in_two)] if self.pair else None

    def queries(self, c, s, stage):
        """(outputs, queries) of those that the state gives something."""
        return [(c.w, s.second.of_keys[stage])] if self.query else []

    def at_query(self, c, shared, stage):
        """What the state gave, as each second query sees it."""
        if self.query and self.spec.gated:
            tk.load_shared_cols(c.at_query, shared.second[None, stage])
            tk.mul_col(c.w, c.w, c.at_query)

    def read_values(self, c, s, tile):
        """c.x = the second values, transposed."""
        if self.pair:
            tk.load_T(c.x, s.second.v[tile])

    def take_up(self, g, c, s, mine, places):
        """The second values as they are at the chunk's end, to be added. places: the tile, the stage of factors."""
        self.read_values(c, s, places[0])
        if self.pair and self.spec.gated:
            tk.load_shared_cols(c.to_end, s.gate.second[None, places[1]])
            tk.apply_narrow(mine[0], lambda v, f: v * f, c.x, c.to_end)
            for rest in mine[1:]:
                tk.apply_narrow(rest, lambda v, f, u: v * f - u, c.x, c.to_end, mine[0])
        elif self.pair:
            tk.apply_narrow(mine[0], lambda v, f: v * f, c.x, -cute.arch.rcp_approx(g.scale))

    def add_own(self, c, s, tile, stage):
        """What a chunk's tokens give each other is under way. tile: of values. stage: of scores."""
        if not self.there:
            return
        o, v = (c.w, s.v[tile]) if self.query else (c.o, s.second.v[tile])
        tk.mma_AtBt(o, v, s.second.p[stage])

    def update(self, c, s, mine, stage):
        """What the state takes up is under way."""
        for values in mine or ():
            tk.mma_AB(c.s, values, s.second.of_keys[stage])


def second_factor(spec: LinearSpec, begun, left, scale) -> Any:
    """Of a token: of its second query, or of its second values as they are at the chunk's end."""
    if spec.second == "query":
        return Float32(0.0) - begun if spec.both_ways else begun
    return Float32(0.0) - left * cute.arch.rcp_approx(scale)
