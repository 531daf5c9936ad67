"""The sums of weights that outputs are divided by: the part of `Based` that knows of them."""
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.based.features import tokens_near
from tkq.linear_attention.based.held import add_held, put_held
from tkq.linear_attention.based.layout import MOMENTS as WIDTH
from tkq.linear_attention.based.layout import ONE
from tkq.linear_attention.based.spec import BasedSpec
from tkq.linear_attention.config import CHUNK


class SumsShared(NamedTuple):
    """one_over: of 64 tokens, for each stage that is ready. high, low: the moments, rounded, and what rounding leaves;
    two stages."""

    one_over: cute.Tensor
    high: tk.SharedTile
    low: tk.SharedTile


@dataclass(frozen=True)
class Moments:
    """Registers. sum: over the chunks before, the sum of the first 64 features of k times its first 32: its 16 linear
    ones with each other, and with 1; the rest is of no use. of_q: the features of q times it. q: the linear features of
    this thread's rows of q. high, low: sum as operands."""

    sum: tk.RegTile
    of_q: tk.RegTile
    q: tk.RegTile
    high: tk.RegTile
    low: tk.RegTile


class Sums:
    """Of weights, in float32: w = 1 + s + s^2 / 2, so that over the n tokens of the chunks before

        sum of w = n + scale q' m + scale^2 / 2 q' M q,   m the sum of k, M the sum of k k'

    and over those of a chunk it is the sum of a row of P, before P is rounded. m and M are exact products that the
    tensor cores add up in float32; their product with q takes them in two parts of 16 bits. A weight is 1 / 2 at least,
    so a sum is half the number of its tokens at least: nothing has to be added before dividing by it."""

    def __init__(self, spec: BasedSpec, dtype: Any):
        self.norm, self.part, self.dtype = spec.norm, spec.part, dtype
        self.outputs = spec.part != "states"
        self.tile = tk.st(CHUNK, WIDTH, dtype)

    def shared(self, al: tk.SharedAllocator, stages) -> Any:
        """Room for them in shared memory; None without a norm, or without outputs."""
        if not self.norm or not self.outputs:
            return None
        return SumsShared(al.vector(CHUNK, stages), al.tile(self.tile, 2), al.tile(self.tile, 2))

    # ---- the features' warpgroup ----------------------------------------------------------------

    def begin(self, g, t) -> Any:
        """Registers, with the moments of the segments before."""
        if not self.norm:
            return None
        m = Moments(tk.rt_fl(WIDTH), tk.rt_fl(WIDTH), tk.rt_fl(16), tk.rt(WIDTH, self.dtype), tk.rt(WIDTH, self.dtype))
        tk.zero(m.sum)
        if self.part == "outputs":
            self.add_segments(m, g, t)
        return m

    @cute.jit
    def add_segments(self, m, g, t):
        for segment in cutlass.range(t.segment, unroll=1):
            add_held((m.sum,), g.moments[segment, t.batch, t.head, None, None])

    @cute.jit
    def end(self, m, g, t):
        """A segment's moments to global memory."""
        if const_expr(self.norm and not self.outputs):
            if t.part == 0:
                put_held(g.moments[t.segment, t.batch, t.head, None, None], (m.sum,))

    def carry(self, m, shared, chunks, stage):
        """The moments of these chunks, divided by a power of 2 near the number of their tokens, as operands."""
        if self.norm and self.outputs:
            times, _ = tokens_near(chunks)
            tk.apply_narrow((m.high,), lambda x: (x * times,), m.sum)
            tk.apply_narrow((m.low,), lambda x, high: (x * times - high,), m.sum, m.high)
            tk.store(shared.high[stage % 2], m.high)
            tk.store(shared.low[stage % 2], m.low)

    def see(self, m, of_q: tk.RegTile):
        """Keep the linear features of this thread's rows of q."""
        if self.norm:
            tk.copy(m.q, tk.columns(of_q, 0, 16))

    def products(self, m, shared, of_q: tk.SharedTile, of_k: tk.SharedTile, i):
        """Start them: q's with the moments that `carry` has put, and the chunk's own moments."""
        if self.norm:
            if self.outputs:
                tk.mm_AB(m.of_q, of_q, shared.high[i % 2], k=(0, 16))
                tk.mma_AB(m.of_q, of_q, shared.low[i % 2], k=(0, 16))
            tk.mma_AtB(m.sum, of_k, of_k, b_part=0)

    @cute.jit
    def put(self, m, shared, p: tk.RegTile, g, t, chunk, before, stage):
        """A chunk's sums: to global memory, and one over them to the state's warpgroup. p: its weights. before: chunks
        that were visited."""
        if const_expr(self.norm):
            sums = tk.rv()
            self.of_chunks_before(sums, m, g.scale, before)
            tk.row_sum_partial(sums, p, sums)
            tk.quad_sum(sums)
            if t.part == 0:
                tk.store_rows(g.sums[t.batch, None, t.head], sums, chunk * CHUNK, g.tokens)
            if tk.lane_id() % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    shared.one_over[tk.first_row() + 8 * r, stage] = cute.arch.rcp_approx(sums.tensor[r])

    @cute.jit
    def of_chunks_before(self, sums: tk.RowVec, m, scale, chunks):
        """This thread's part: of M q its own columns, and one of four has n and q' m."""
        _, back = tokens_near(chunks)
        first = tk.lane_id() % 4 == 0
        for r in cutlass.range_constexpr(2):
            of_q, q = m.of_q.rows_view, m.q.rows_view
            square = of_q[r, 0] * q[r, 0]
            for j in cutlass.range_constexpr(1, 4):
                square = cute.math.fma(of_q[r, j], q[r, j], square)
            alone = cute.math.fma(scale * back, of_q[r, ONE // 4], Float32(chunks * CHUNK))
            sums.tensor[r] = cutlass.select_(first, alone, Float32(0.0)) + square * (scale * scale * back * 0.5)

    # ---- the state's warpgroup ------------------------------------------------------------------

    def divide(self, o: tk.RegTile, factor: tk.ColVec, shared, stage):
        """Outputs, transposed, by their sums, with a norm."""
        tk.load_shared_cols(factor, shared.one_over[None, stage])
        tk.mul_col(o, o, factor)
