"""A block of 16 tokens by one warp: decays, rows with their factors, scores, the triangular inverse."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import (
    EDGE,
    PANEL,
    ROW,
    BlockInverse,
    block_words,
    keep,
    panels_of,
    products,
    put_block,
    put_two,
    unpacked,
    words,
)
from tkq.linear_attention.blocks.qk_tiles import KEYS, QUERIES
from tkq.linear_attention.channels.bounded.config import COLUMNS, SCORES
from tkq.linear_attention.channels.l2norm import EPS
from tkq.linear_attention.config import CHUNK
from tkq.tile.maps import _cvt2

OF_LANE = 4  # columns
UNIT = EDGE * PANEL // 4  # of 16 x 64: pairs of words
TOGETHER = 4  # tokens whose rows are read before they are written


def exp2(x):
    return cute.math.exp2(x, fastmath=True)


def z_factor(A_log):
    """What a projection's number, and its bias, are multiplied by in `decay`."""
    return -exp2(A_log * tk.LOG2E) * tk.LOG2E


def decay(x, factor, bias, bound):
    """exp(g) of a projection's number. factor: as `z_factor` makes it. bias: times factor. bound: to base 2."""
    z = cute.math.fma(x, factor, bias)
    return exp2(bound * cute.arch.rcp_approx(1.0 + exp2(z)))


class Mine(NamedTuple):
    """Of a lane. factor: -exp(A_log), and bias times that, of its columns, to base 2. at: where its words of a token
    lie, in pairs of words, for tokens that the swizzle moves alike. apart: from there to where they are in a
    tile of keys. beta: of the tokens of its quad's two rows, of the chunk that follows."""

    factor: cute.Tensor
    bias: cute.Tensor
    at: cute.Tensor
    apart: cute.Tensor
    beta: cute.Tensor


class Rows(NamedTuple):
    """Of a lane's quad, two rows each. queries: scale over a query's length. keys: 1 over a key's."""

    queries: list
    keys: list


class Blocks:
    """What `BoundedAttention` has of a block of 16 tokens. With f[i] what a column decays by from the block's middle to
    token i (see `Whole`), x the projection's number, G its gate, by one warp:

        lane     4 columns of all tokens: G, f q, f k, k / f in the place of q, x and k; of the block's halves, what
                 they decay by
        warp     |q|^2, |k|^2, P = f q (k / f)', L = f k (k / f)' by products of 16 x 16 x 128; (I + L)^-1

    Factors are products of decays, outwards from the middle, and one reciprocal for each 4 tokens."""

    def __init__(self, spec: Any, qk_tiles: Any, barrier: int):
        """qk_tiles: where a chunk's rows are (see `blocks.qk_tiles`). barrier: the first scores' warpgroup's."""
        self.qk_tiles = qk_tiles
        self.spec, self.barrier, self.inverse = spec, barrier, BlockInverse()

    @cute.jit
    def begin(self, g, t) -> Mine:
        lane, warp = tk.lane_id(), tk.warp_id() % 4
        mine = Mine(*[cute.make_rmem_tensor((n,), kind)
                      for n, kind in ((1, Float32), (OF_LANE, Float32), (8, Int32), (1, Int32), (2, Float32))])
        mine.factor[0] = z_factor(g.own.A_log[t.head])
        for e in cutlass.range_constexpr(OF_LANE):
            mine.bias[e] = g.own.bias[t.head * COLUMNS + OF_LANE * lane + e] * mine.factor[0]
        for moved in cutlass.range_constexpr(8):
            mine.at[moved] = (2 * warp + lane // 16) * (2 * UNIT) + ((lane % 16) ^ (2 * moved))
        mine.apart[0] = (lane // 16 * (CHUNK // EDGE) + warp) * UNIT - (2 * warp + lane // 16) * (2 * UNIT)
        return mine

    @cute.jit
    def ask(self, g, t, chunk, mine: Mine):
        """beta of a chunk is on its way: 0 where there is no such token."""
        for r in cutlass.range_constexpr(2):
            token = chunk * CHUNK + tk.first_row() + 8 * r
            mine.beta[r] = Float32(0.0)
            if token < g.tokens:
                mine.beta[r] = Float32(g.beta[t.batch, token, t.head])

    @cute.jit
    def make(self, g, s, t, of, mine: Mine):
        """All of it, of a chunk whose tokens are there; visible to wgmma. of: the chunk, the warpgroup."""
        chunk, wg = of
        rows = self.lengths(g, s, wg)
        beta = [mine.beta[0], mine.beta[1]]
        self.ask(g, t, chunk + SCORES, mine)
        self.put_factors(s, rows, beta, wg)
        cute.arch.sync_warp()  # all lanes have read what is overwritten
        self.put_rows(g, s, (chunk, wg), mine)
        cute.arch.sync_warp()
        self.put_scores(s, rows, beta, wg)
        tk.sync(self.barrier + wg, tk.WARPGROUP)
        self.join_steps(s, wg)
        tk.publish()

    # ---- lengths -------------------------------------------------------------------------------

    def lengths(self, g, s, wg) -> Rows:
        """By products of rows with themselves, whose diagonals are taken."""
        row = tk.lane_id() // 4
        owner, odd = 4 * row + row // 2, row % 2 == 1
        found = []
        for rows in (self.qk_tiles.rows(s.qk_tiles, wg, QUERIES), panels_of(s.k[wg])):
            (d,) = products((rows,), ((0, 0),), COLUMNS, BFloat16)
            found.append([cute.arch.shuffle_sync(cutlass.select_(odd, d[2 * r + 1, 0, r], d[2 * r, 0, r]), owner)
                          for r in range(2)])
        over = [[cute.math.rsqrt(x + EPS, fastmath=True) for x in one] for one in found]
        return Rows([g.scale * x for x in over[0]], over[1])

    @cute.jit
    def put_factors(self, s, rows: Constexpr, beta: Constexpr, wg):
        """What the state multiplies values, what it gives and outputs by (see `QkTiles`)."""
        queries, of_values, of_state = s.lengths.queries, s.delta.erase, s.delta.beta
        if tk.lane_id() % 4 == 0:
            for r in cutlass.range_constexpr(2):
                i, b = tk.first_row() + 8 * r, rows.keys[r]
                queries[i, wg] = rows.queries[r]
                of_values[i, wg] = b * beta[r]
                of_state[i, wg] = b * b * beta[r]

    # ---- rows ----------------------------------------------------------------------------------

    @cute.jit
    def put_rows(self, g, s, of, mine: Mine):
        """Tokens 8 .. 15 from the middle on, then 7 .. 0 from the middle back."""
        chunk, wg = of
        of_tiles, k = words(s.qk_tiles[self.qk_tiles.at(wg, 0, 0, 0)]), (words(s.k[wg]), mine.apart[0])
        x, q = (of_tiles, KEYS * UNIT), (of_tiles, QUERIES * UNIT)
        some = [list(range(n, n + TOGETHER)) for n in (8, 12, 4, 0)]
        left = g.tokens - chunk * CHUNK - tk.warp_id() % 4 * EDGE
        ahead, carry = take(x, mine, some[0]), None
        for n in cutlass.range_constexpr(len(some)):
            tokens, late = some[n], some[n][0] >= 8
            of_x = ahead
            if const_expr(n + 1 < len(some)):
                ahead = take(x, mine, some[n + 1])
            of_q, of_k = take(q, mine, tokens), take(k, mine, tokens)
            decays = [self.decays(g, mine, of_x[m], i < left) for m, i in enumerate(tokens)]
            times, over, carry = factors(decays, carry, late)
            for m, i in enumerate(tokens):
                key = unpacked_four(of_k[m])
                put(q, mine, i, unpacked_four(of_q[m]), times[m])
                put(k, mine, i, key, over[m])
                put(x, mine, i, key, times[m])
            if const_expr(tokens[0] == 12):
                self.put_behind(s, carry, wg)
                carry = None
        self.put_first(s, carry, wg)

    def decays(self, g, mine, words, there):
        """Of a lane's columns at a token; 1 behind the sequence's end."""
        bound = cutlass.select_(there, g.own.bound * tk.LOG2E, Float32(0.0))
        return [decay(x, mine.factor[0], mine.bias[e], bound) for e, x in enumerate(unpacked_four(words))]

    @cute.jit
    def put_behind(self, s, found: Constexpr, wg):
        """What the block's second half decays by: of the step in front of the next block."""
        put_four(s.whole.steps[None, wg], tk.warp_id() % 4 + 1, found)

    @cute.jit
    def put_first(self, s, found: Constexpr, wg):
        """The first half's, which is of the same step as the second half of the block before."""
        warp = tk.warp_id() % 4
        put_four(s.firsts[None, wg], warp, found)
        if warp == 0:
            put_four(s.whole.steps[None, wg], 0, found)

    @cute.jit
    def join_steps(self, s, wg):
        """Behind a barrier, a column each."""
        steps, firsts = s.whole.steps, s.firsts
        for n in cutlass.range_constexpr(1, CHUNK // EDGE):
            at = n * COLUMNS + tk.thread_in_warpgroup()
            steps[at, wg] = steps[at, wg] * firsts[at, wg]

    # ---- scores --------------------------------------------------------------------------------

    def put_scores(self, s, lengths, beta, wg):
        """P and the inverse, of 16 x 16, on the diagonals of their tiles."""
        rows = *(self.qk_tiles.rows(s.qk_tiles, wg, which) for which in (KEYS, QUERIES)), panels_of(s.k[wg])
        lower, p = products(rows, ((0, 2), (1, 2)), COLUMNS, BFloat16)
        keep(p, True, lambda r, n, e: lengths.queries[r])
        factors = [b * b * x for b, x in zip(lengths.keys, beta)]
        keep(lower, False, lambda r, n, e: factors[r])
        self.inverse.invert(s.delta.lower[None, wg], lower)
        put_block(block_words(s.p[wg]), p, BFloat16)
        put_two(s.delta.inverse[wg], lower, BFloat16)


def two_at(rows, mine: Mine, i):
    """A lane's words of a block's token i, two side by side. rows: words, and how far from `Mine.at` they are."""
    pairs = cute.make_tensor(rows[0].iterator, cute.make_layout((2, CHUNK * COLUMNS)))
    return pairs[None, mine.at[i % 8] + (rows[1] + i * (ROW // 2))]


def take(rows, mine: Mine, tokens):
    """[two words of each token]."""
    found = [cute.make_rmem_tensor((2,), Int32) for _ in tokens]
    for to, i in zip(found, tokens):
        cute.autovec_copy(two_at(rows, mine, i), to)
    return found


def put(rows, mine: Mine, i, x, f):
    """A token's numbers times f, rounded."""
    two = cute.make_rmem_tensor((2,), Int32)
    for n in range(2):
        two[n] = _cvt2(x[2 * n] * f[2 * n], x[2 * n + 1] * f[2 * n + 1], BFloat16)
    cute.autovec_copy(two, two_at(rows, mine, i))


def put_four(to: cute.Tensor, n, x):
    """Of a lane's columns, the n-th row of them."""
    four = cute.make_rmem_tensor((OF_LANE,), Float32)
    for e in range(OF_LANE):
        four[e] = x[e]
    fours = cute.make_tensor(to.iterator, cute.make_layout((OF_LANE, cute.size(to) // OF_LANE)))
    cute.autovec_copy(four, fours[None, n * (COLUMNS // OF_LANE) + tk.lane_id()])


def unpacked_four(two):
    """Of two words, as fp32."""
    return [x for n in range(2) for x in unpacked(two[n], BFloat16)]


def factors(decays, carry, late):
    """(f, 1 / f) of some tokens, in order, and carry: of what lies between the middle and those that are next. late:
    tokens behind the middle, f at most 1, of which carry is the last; else in front of it, and carry is 1 / f in front
    of the first. carry None: 1."""
    inner = [carry]  # the factor that is at most 1
    for a in decays if late else reversed(decays):
        inner.append(times(inner[-1], a))
    carry = inner[-1]
    if late:
        f = inner[1:]
        over = [[cute.arch.rcp_approx(x) for x in f[-1]]]
        for a in reversed(decays[1:]):
            over.insert(0, times(over[0], a))
        return f, over, carry
    over = inner[-2::-1]
    f = [[Float32(1.0)] * OF_LANE if over[0] is None else [cute.arch.rcp_approx(x) for x in over[0]]]
    for a in decays[1:]:
        f.append(times(f[-1], a))
    return f, [[Float32(1.0)] * OF_LANE if x is None else x for x in over], carry


def times(f, a):
    return list(a) if f is None else [x * y for x, y in zip(f, a)]
