"""Queries and keys of length 1: what the rows of a chunk are divided by, where they come of any length."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import words
from tkq.linear_attention.channels.columns import Columns, unpacked
from tkq.linear_attention.config import CHUNK

EPS = 1e-6  # added to the sum of squares
LANES = 8  # of a row


class L2NormShared(NamedTuple):
    """Of a chunk's tokens, 1 over a row's length: of queries, times the scale, in two stages; of keys, which the
    scores' warpgroup alone reads."""

    queries: cute.Tensor
    keys: cute.Tensor


class L2Norm:
    """Of a token let b be 1 over the length of its key, and a that of its query. With the rows as they come

        u[t] = beta[t] (v[t] - b[t] S' k[t]),   S takes up b[t] k[t] u[t]',   o[t] = a[t] scale S' q[t]

    so that w = b u has the delta rule of k as it comes with b beta v in the place of beta v and b^2 beta in that of
    beta elsewhere; and of outputs each token's are multiplied by a. No row is rounded once more."""

    def __init__(self, spec: Any, columns: Columns):
        self.columns, self.there = columns, spec.l2norm

    def shared(self, al: tk.SharedAllocator) -> Any:
        """Room for it; None without."""
        return L2NormShared(al.vector(CHUNK, 2), al.vector(CHUNK, 1)) if self.there else None

    @cute.jit
    def find(self, tiles: Constexpr, shared: L2NormShared, stage, scale):
        """By the scores' warpgroup: a warp has 16 tokens. Behind it a barrier. tiles: q and k."""
        self.of_rows(words(tiles[0]), shared.queries[None, stage], scale)
        self.of_rows(words(tiles[1]), shared.keys[None, 0], Float32(1.0))

    def of_queries(self, shared, stage) -> tk.RowVec:
        """Of a chunk's rows of scores."""
        found = tk.rv()
        tk.load_rows(found, shared.queries[None, stage], 0, CHUNK)
        return found

    @cute.jit
    def of_rows(self, rows: cute.Tensor, to: cute.Tensor, scale):
        """8 lanes have a row, 4 words of it at a time, which lie side by side whatever the swizzle."""
        c, lane = self.columns, tk.lane_id() % LANES
        four = cute.make_rmem_tensor((4,), Int32)
        for first in cutlass.range_constexpr(0, CHUNK // 4, 32 // LANES):
            token = tk.warp_id() % 4 * (CHUNK // 4) + first + tk.lane_id() // LANES
            total = cute.make_rmem_tensor((1,), Float32)
            total[0] = Float32(0.0)
            for n in cutlass.range_constexpr(-(-c.columns // (8 * LANES))):
                pair = 4 * (n * LANES + lane)
                if 2 * pair < c.columns:
                    at = pair // c.row * (CHUNK * c.row) + token * c.row
                    at = at + ((pair % c.row) ^ (4 * (token * c.row // 32 % (c.row // 4))))
                    cute.autovec_copy(cute.make_tensor(rows.iterator + at, cute.make_layout(4)), four)
                    for i in cutlass.range_constexpr(4):
                        x, y = unpacked(four[i], c.dtype)
                        total[0] = total[0] + x * x + y * y
            for i in cutlass.range_constexpr(LANES.bit_length() - 1):
                total[0] = total[0] + cute.arch.shuffle_sync_bfly(total[0], offset=1 << i)
            if lane == 0:
                to[token] = scale * cute.math.rsqrt(total[0] + EPS, fastmath=True)

    @cute.jit
    def factors(self, found: cute.Tensor, shared: L2NormShared, of_values: cute.Tensor, of_state: cute.Tensor):
        """b beta, and b^2 beta in the place of beta, of two tokens of each lane of the first warp. found: beta."""
        if tk.warp_id() % 4 == 0:
            for e in cutlass.range_constexpr(2):
                i = 2 * tk.lane_id() + e
                b = shared.keys[i, 0]
                of_values[i] = b * found[e]
                of_state[i] = b * b * found[e]
