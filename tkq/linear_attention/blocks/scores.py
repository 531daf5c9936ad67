"""P, the inverse and what decays, of a block of 16 tokens by one warp."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import (
    EDGE,
    BlockInverse,
    block_words,
    elements,
    keep,
    products,
    put_block,
    put_two,
)
from tkq.linear_attention.blocks.qk_tiles import KEYS, QUERIES, QkTiles
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.gates import LOWEST
from tkq.linear_attention.engine.segmented import visited
from tkq.tile.dtypes import element_type


class Factors(NamedTuple):
    """Of a chunk's tokens, each stage, with G the running sum of a block's gates, in powers of 2. at_query: scale *
    2^G. erase: beta * 2^G; of what values lack 2^G. to_end: 2^(G[15] - G). total: 2^G[15] of each block. Reversed,
    at_query and to_end are the other way around, and erase is 2^G over the scale."""

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

    and (I + L)^-1, in 16 bits. With updates of M in the place of L, M[i, j] = beta[j] L[i, j] / beta[i]. Reversed,
    where keys have the queries' place and queries that of keys,

        P[i, j] = scale 2^(G[j] - G[i]) k[i] q[j] for j >= i,  -N'[i, j] = -2^(G[j] - G[i]) k[i] k[j] for j > i

    and the transpose of (I + M)^-1."""

    def __init__(self, spec: Any, qk_tiles: QkTiles):
        self.qk_tiles = qk_tiles
        self.spec, self.dtype, self.gated = spec, element_type(spec.dtype), spec.gate != "none"
        self.inverse, self.reverse = BlockInverse(), spec.reverse
        self.of_columns = spec.updates or spec.reverse  # M in the place of L (see `engine.delta`)

    def shared(self, al: tk.SharedAllocator, stages: int) -> Factors:
        """Room for factors."""
        return Factors(*[al.vector(CHUNK, stages) for _ in range(4)], al.vector(CHUNK // EDGE, stages))

    @cute.jit
    def begin(self, g, t) -> Mine:
        mine = Mine(*[cute.make_rmem_tensor((1,), Float32) for _ in range(2)])
        self.ask(g, t, visited(t, 0, self.reverse), mine)
        return mine

    @cute.jit
    def ask(self, g, t, chunk, mine: Mine):
        """A chunk's gate and beta are on their way: 0 where there is no such token."""
        token = chunk * CHUNK + (tk.warp_id() % 4 * EDGE + tk.lane_id() % EDGE)
        mine.gate[0], mine.beta[0] = Float32(0.0), Float32(0.0)
        there = token < g.tokens
        if const_expr(self.reverse):
            there = there and token >= 0
        if there:
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
        self.ask(g, t, chunk - 1 if const_expr(self.reverse) else chunk + 1, mine)
        rows = [self.qk_tiles.rows(s.qk_tiles, stage, which) for which in (KEYS, QUERIES)]
        pair = (KEYS, QUERIES) if self.reverse else (QUERIES, KEYS)
        lower, p = products(rows, ((KEYS, KEYS), pair), self.spec.head_dim, self.dtype)
        decay = seen = None
        if const_expr(self.gated):
            total = self.running(total)
            decay = self.decays(total)
            seen = self.decays(total, True) if const_expr(self.reverse) else decay
        self.put_factors(g, s.factors, (total, beta), out)
        keep(p, True, lambda r, n, e: g.scale, seen, self.reverse)
        put_block(block_words(s.p[out]), p, self.dtype)
        if const_expr(self.spec.has_x):  # p's registers are free
            for r, n, e in elements():
                p[2 * r + e, 0, n] = lower[2 * r + e, 0, n]
            keep(p, False, lambda r, n, e: Float32(-1.0), seen, True)
            put_block(block_words(s.keys[out]), p, self.dtype)
        keep(lower, False, self.betas(beta), decay)
        self.inverse.invert(s.lower[None, 0], lower, self.reverse)
        put_two(s.inverse[out], lower, self.dtype)

    def betas(self, beta):
        """(r, n, e) -> beta of a row, or, where R comes out, of a column."""
        if not self.of_columns:
            rows = [cute.arch.shuffle_sync(beta, tk.lane_id() // 4 + 8 * r) for r in range(2)]
            return lambda r, n, e: rows[r]
        first = 2 * (tk.lane_id() % 4)
        columns = [[cute.arch.shuffle_sync(beta, first + (8 * n + e)) for e in range(2)] for n in range(2)]
        return lambda r, n, e: columns[n][e]

    def running(self, x):
        """Of 16 lanes, up to each one's."""
        for i in range(EDGE.bit_length() - 1):
            other = cute.arch.shuffle_sync_up(x, offset=1 << i, mask_and_clamp=0)
            x = x + cutlass.select_(tk.lane_id() % EDGE >= 1 << i, other, Float32(0.0))
        return x

    def decays(self, total, above=False):
        """(r, n, e) -> 2^(G[i] - G[j]) of a lane's elements of 16 x 16, each once; above: 2^(G[j] - G[i])."""
        row, col = tk.lane_id() // 4, 2 * (tk.lane_id() % 4)
        rows = [cute.arch.shuffle_sync(total, row + 8 * r) for r in range(2)]
        cols = [[cute.arch.shuffle_sync(total, col + (8 * n + e)) for e in range(2)] for n in range(2)]
        found = {(r, n, e): cute.math.exp2(cols[n][e] - rows[r] if above else rows[r] - cols[n][e], fastmath=True)
                 for r, n, e in elements()}
        return lambda r, n, e: found[r, n, e]

    @cute.jit
    def put_factors(self, g, to: Factors, of: Constexpr, stage):
        """By the lanes of a block's tokens. of: G and beta of a lane's."""
        total, beta = of
        last, i = cute.arch.shuffle_sync(total, EDGE - 1), tk.warp_id() % 4 * EDGE + tk.lane_id()
        begun, left = (cute.math.exp2(x, fastmath=True) for x in (total, last - total))
        erase = begun if const_expr(self.of_columns) else beta * begun
        if const_expr(self.reverse):
            erase = begun * cute.arch.rcp_approx(g.scale)
            begun, left = left, begun
        if tk.lane_id() < EDGE:
            to.at_query[i, stage] = g.scale * begun
            to.beta[i, stage] = beta
            to.erase[i, stage] = erase
            to.to_end[i, stage] = left
        if tk.lane_id() == 0:
            to.total[tk.warp_id() % 4, stage] = cute.math.exp2(last, fastmath=True)
