"""P, the inverse and what decays, of a block of 16 tokens by one warp."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import EDGE, BlockInverse, block_words, keep, products, put_block, put_two
from tkq.linear_attention.blocks.units import KEYS, QUERIES, Units
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.gates import LOWEST
from tkq.tile.dtypes import element_type


class Factors(NamedTuple):
    """Of a chunk's tokens, each stage, with G the running sum of a block's gates, in powers of 2. at_query: scale *
    2^G. erase: beta * 2^G. to_end: 2^(G[15] - G). total: 2^G[15] of each block."""

    at_query: cute.Tensor
    beta: cute.Tensor
    erase: cute.Tensor
    to_end: cute.Tensor
    total: cute.Tensor


class Mine(NamedTuple):
    """Of a lane, its token of the chunk that follows: two lanes have one."""

    gate: cute.Tensor
    beta: cute.Tensor


class BlockScores:
    """With G the running sum of the gates of a block, in powers of 2, by a warp

        P[i, j] = scale 2^(G[i] - G[j]) q[i] k[j] for j <= i
        L[i, j] = beta[i] 2^(G[i] - G[j]) k[i] k[j] for j < i

    and (I + L)^-1, in 16 bits."""

    def __init__(self, spec: Any, units: Units):
        self.units = units
        self.spec, self.dtype, self.gated = spec, element_type(spec.dtype), spec.gate != "none"
        self.inverse = BlockInverse()

    def shared(self, al: tk.SharedAllocator, stages: int) -> Factors:
        """Room for factors."""
        return Factors(*[al.vector(CHUNK, stages) for _ in range(4)], al.vector(CHUNK // EDGE, stages))

    @cute.jit
    def begin(self, g, t) -> Mine:
        mine = Mine(*[cute.make_rmem_tensor((1,), Float32) for _ in range(2)])
        self.ask(g, t, 0, mine)
        return mine

    @cute.jit
    def ask(self, g, t, chunk, mine: Mine):
        """A chunk's gate and beta are on their way: 0 where there is no such token."""
        token = chunk * CHUNK + (tk.warp_id() % 4 * EDGE + tk.lane_id() % EDGE)
        mine.gate[0], mine.beta[0] = Float32(0.0), Float32(0.0)
        if token < g.tokens:
            mine.beta[0] = Float32(g.beta[t.batch, token, t.head])
            if const_expr(self.gated):
                mine.gate[0] = g.g[t.batch, token, t.head]

    @cute.jit
    def make(self, g, s, t, of: Constexpr, mine: Mine):
        """Of a chunk whose tokens are there; visible to wgmma behind `publish`. of: the chunk, stages of tokens and of
        scores."""
        chunk, stage, out = of
        beta, total = mine.beta[0], mine.gate[0] * tk.LOG2E
        total = cutlass.select_(total < LOWEST, Float32(LOWEST), total)
        self.ask(g, t, chunk + 1, mine)
        rows = [self.units.rows(s.units, stage, which) for which in (KEYS, QUERIES)]
        lower, p = products(rows, ((0, 0), (1, 0)), self.spec.head_dim, self.dtype)
        decay = None
        if const_expr(self.gated):
            total = self.running(total)
            decay = self.decays(total)
        self.put_factors(g, s.factors, (total, beta), out)
        row = tk.lane_id() // 4
        keep(p, True, [g.scale, g.scale], decay)
        keep(lower, False, [cute.arch.shuffle_sync(beta, row + 8 * r) for r in range(2)], decay)
        self.inverse.invert(s.lower[None, 0], lower)
        put_block(block_words(s.p[out]), p, self.dtype)
        put_two(s.inverse[out], lower, self.dtype)

    def running(self, x):
        """Of 16 lanes, up to each one's."""
        for i in range(EDGE.bit_length() - 1):
            other = cute.arch.shuffle_sync_up(x, offset=1 << i, mask_and_clamp=0)
            x = x + cutlass.select_(tk.lane_id() % EDGE >= 1 << i, other, Float32(0.0))
        return x

    def decays(self, total):
        """(r, n, e) -> 2^(G[i] - G[j]) of a lane's elements of 16 x 16, each once."""
        row, col = tk.lane_id() // 4, 2 * (tk.lane_id() % 4)
        rows = [cute.arch.shuffle_sync(total, row + 8 * r) for r in range(2)]
        cols = [[cute.arch.shuffle_sync(total, col + (8 * n + e)) for e in range(2)] for n in range(2)]
        found = {(r, n, e): cute.math.exp2(rows[r] - cols[n][e], fastmath=True)
                 for r in range(2) for n in range(2) for e in range(2)}
        return lambda r, n, e: found[r, n, e]

    @cute.jit
    def put_factors(self, g, to: Factors, of: Constexpr, stage):
        """By the lanes of a block's tokens. of: G and beta of a lane's."""
        total, beta = of
        last, i = cute.arch.shuffle_sync(total, EDGE - 1), tk.warp_id() % 4 * EDGE + tk.lane_id()
        begun = cute.math.exp2(total, fastmath=True)
        if tk.lane_id() < EDGE:
            to.at_query[i, stage] = g.scale * begun
            to.beta[i, stage] = beta
            to.erase[i, stage] = beta * begun
            to.to_end[i, stage] = cute.math.exp2(last - total, fastmath=True)
        if tk.lane_id() == 0:
            to.total[tk.warp_id() % 4, stage] = cute.math.exp2(last, fastmath=True)
