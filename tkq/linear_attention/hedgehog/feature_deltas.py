"""The outputs' part of the features' kernel, of queries: dot products of each token's output and its gradient."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.hedgehog.spec import FeatureSpec

DELTA_WARPS = 3  # beside the producer's
COLUMNS, VECTOR = 64, 8  # of a line of 128 bytes, of what a lane has of it


class DeltaPart:
    """By the warps that the producer's warpgroup has beside it, a chunk ahead of the gradients. Tiles of o and do are
    read line by line as they lie in memory: both have a line's columns in the same order."""

    def __init__(self, spec: FeatureSpec):
        self.lanes = spec.head_dim // VECTOR  # of a row
        self.rows = 32 // self.lanes  # of a warp, at once

    @cute.jit
    def run(self, g, s, t):
        tokens, olds, out = s.tokens.ring(), s.olds.ring(), s.deltas.ring()
        delta, to, lane = s.delta, g.delta, tk.lane_id() % self.lanes
        for i in cutlass.range(t.chunks, unroll=1):
            s.tokens.wait(tokens)
            s.olds.wait(olds)
            s.deltas.acquire_empty(out)
            for n in cutlass.range(tk.warp_id() - 1, CHUNK // self.rows, DELTA_WARPS, unroll=1):
                row = n * self.rows + tk.lane_id() // self.lanes
                total = self.dot(s.a[tokens.stage], s.out[olds.stage], row, lane)
                if lane == 0:
                    delta[row, out.stage] = total
                    if i * CHUNK + row < g.tokens:
                        to[t.batch, i * CHUNK + row, t.head] = total
            s.olds.release(olds)
            s.deltas.commit(out)
            for ring in (tokens, olds, out):
                ring.advance()

    def dot(self, a: tk.SharedTile, b: tk.SharedTile, row, lane):
        """Of a row, by its lanes: each has all of it."""
        at = cute.crd2idx((row, COLUMNS * (lane // VECTOR)), a.tensor.layout) + VECTOR * (lane % VECTOR)
        x, y = [self.line(tile, at) for tile in (a, b)]
        total = x[0] * y[0]
        for e in range(1, VECTOR):
            total = cute.math.fma(x[e], y[e], total)
        for step in range(self.lanes.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        return total

    def line(self, tile, at):
        """Eight elements as fp32, wherever the swizzle has them."""
        held = cute.make_rmem_tensor((VECTOR,), tile.type.dtype)
        first = cute.recast_ptr(tile.tensor.iterator, dtype=tile.type.dtype) + at
        words = cute.make_tensor(cute.recast_ptr(first.align(16), dtype=Int32), cute.make_layout(VECTOR // 2))
        cute.autovec_copy(words, cute.recast_tensor(held, Int32))
        wide = held.load().to(Float32)
        return [wide[e] for e in range(VECTOR)]
