"""Mamba-2's state space dual (Dao and Gu, 2024): gates and values of one step size, a skip connection, an output
gate."""
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.ahead import token_of
from tkq.linear_attention.engine.gates import LOWEST
from tkq.linear_attention.spec import NARROW, LinearSpec
from tkq.runtime.compile import fake


class SsdOperands(NamedTuple):
    """dt: (B, S, HO). A: (HO,) fp32. bias: None or (HO,). skip: D, None, (HO,) or (HO, V). low, high: dt's limits.
    of_skip: None, or (N, HO, V) fp32, D's gradient of each of N sequences, or segments of them, and column. diagonal:
    None, or, with sums of o times x, (B, S, HO) fp32: q k of each token."""

    dt: cute.Tensor
    A: cute.Tensor
    bias: Optional[cute.Tensor]
    skip: Optional[cute.Tensor]
    low: Float32
    high: Float32
    of_skip: Optional[cute.Tensor]
    diagonal: Optional[cute.Tensor]


class Ssd:
    """With d = clamp(softplus(dt + bias)) of each token, made with the gates' factors, in fp32:

        g = d A,  and what a token adds to the state is k (d v)'
        o = (o + D v) silu(z)

    so that v times d is neither written nor rounded. Where v is multiplied, by P and into the state, d[j] is a part of
    the factors that are there: P[i, j] = d[j] e^(G[i] - G[j]) q[i] k[j], and e^(G[63] - G[j]) d[j].

    Reversed, a token that adds in the forward receives: what it gets is multiplied, o = d o + D v. With v = dO and
    k' = q, q' = k this is x's gradient; sums of o times x are of o before that, and x times v, summed over the tokens,
    is D's gradient.

    With sums of o times x ("dot") P has no diagonal: what a token has from itself is not in the sums, whose differences
    are of the others alone. It comes to the outputs behind them, in fp32: o = o + v times the diagonal."""

    def __init__(self, spec: LinearSpec):
        self.spec, self.ssd, self.there = spec, spec.ssd, spec.ssd is not None
        self.adds, self.gets = self.there and not spec.reverse, self.there and spec.reverse
        self.skips, self.gated = self.there and spec.ssd.skip is not None, spec.gated_by_x
        self.apart = self.there and spec.dot  # is P's diagonal apart?
        self.finishes = self.gets or self.skips or self.gated or self.apart

    def fake_operands(self, B, S, HO, rows):
        """For the compiler; None without it. rows: of states."""
        if not self.there:
            return None
        ssd, V = self.ssd, self.spec.value_dim

        def of(dtype, *shape):
            strides = tuple(fake.sym64() for _ in shape)
            return dtype and fake.tensor(dtype, shape, strides, align=4 if dtype == "fp32" else 2)

        return SsdOperands(of(ssd.dt, B, S, HO), of("fp32", HO), of(ssd.bias, HO),
                           of(ssd.skip, *(HO, V)[:ssd.skip_dims]), Float32(0.0), Float32(0.0),
                           fake.tensor("fp32", (rows, HO, V), align=4) if ssd.skip_gradient else None,
                           fake.tensor("fp32", (B, S, HO), align=4) if self.apart and self.spec.writes else None)

    def shared(self, al: tk.SharedAllocator) -> Any:
        """Room for diagonals in shared memory, of a stage that of P and q k; None where they are not apart."""
        return al.vector(CHUNK, 4) if self.apart else None

    # ---- the scores' warpgroup -----------------------------------------------------------------

    @cute.jit
    def steps(self, g, t, chunk, now: cute.Tensor):
        """Of two tokens a lane of the warp that makes the chunk's factors, from their dt: gates in powers of 2,
        then d; 0 past the end. NaN stays NaN."""
        ssd, o = self.ssd, g.ssd
        found = cute.make_rmem_tensor((4,), Float32)
        decay = o.A[t.head] * tk.LOG2E
        for e in cutlass.range_constexpr(2):
            d = Float32(now[e])
            if const_expr(ssd.bias is not None):
                d = d + Float32(o.bias[t.head])
            if const_expr(ssd.softplus):
                above = d if d > Float32(0.0) else Float32(0.0)
                below = -d if d > Float32(0.0) else d
                d = above + cute.math.log1p(cute.math.exp(below))
            d = o.low if d < o.low else d
            d = o.high if d > o.high else d
            x = d * decay
            x = Float32(LOWEST) if x < LOWEST else x
            token = token_of(chunk, e)
            there = token >= 0 and token < g.tokens
            found[e] = x if there else Float32(0.0)  # apart: 0 times an A of -inf is none
            found[2 + e] = d if there else Float32(0.0)
        return found

    @cute.jit
    def put_diagonal(self, shared, x: tk.RegTile, between, scale, stage):
        """q k of each token, and that with P's factor, to shared memory; x: the scores."""
        if const_expr(self.apart):
            view = x.rows_view
            for r in cutlass.range_constexpr(2):
                row = tk.first_row() + 8 * r
                for j in cutlass.range_constexpr(CHUNK // 4):
                    if row == tk.first_col() + 8 * (j // 2) + j % 2:
                        factor = between[2].tensor[j] if const_expr(self.adds) else scale
                        shared[row, 2 * stage] = view[r, j] * factor
                        shared[row, 2 * stage + 1] = view[r, j]

    # ---- the state's warpgroups ----------------------------------------------------------------

    @cute.jit
    def add_diagonal(self, c, shared, stage):
        """What each token has from itself, behind the sums."""
        if const_expr(self.apart):
            tk.load_shared_cols(c.beta, shared[None, 2 * stage])
            for i in cutlass.range_constexpr(cute.size(c.o.tensor)):
                c.o.tensor[i] = c.o.tensor[i] + c.beta.tensor[i // 4 * 2 + i % 2] * Float32(c.v.tensor[i])

    @cute.jit
    def write_diagonal(self, g, t, shared, place, stage):
        """q k of a chunk's tokens, by the block that has the first columns. place: (the warpgroup, the chunk)."""
        if const_expr(self.apart):
            wg, chunk = place
            thread = tk.thread_in_warpgroup()
            token = chunk * CHUNK + thread
            if wg + t.part == 0 and thread < CHUNK and token < g.tokens:
                g.ssd.diagonal[t.batch, token, t.head] = shared[thread, 2 * stage + 1]

    def begin(self, g, t, row0):
        """(D of this thread's two rows of V, the sums of its gradient); None where there is no D."""
        if not self.skips:
            return None
        skip, sums = tk.rv(), tk.rv()
        self.read_skip(g, t, row0, skip)
        tk.zero(sums)
        return skip, sums

    @cute.jit
    def read_skip(self, g, t, row0, skip: tk.RowVec):
        for r in cutlass.range_constexpr(2):
            row = row0 + tk.first_row() + 8 * r
            if const_expr(self.ssd.skip_dims == 1 and not self.spec.packed):
                skip.tensor[r] = Float32(g.ssd.skip[t.head])
            else:  # not for tokens of no sequence: what is no number there is none in their outputs
                skip.tensor[r] = Float32(0.0)
                if row < self.spec.value_dim and g.tokens > 0:
                    skip.tensor[r] = Float32(g.ssd.skip[t.head] if const_expr(self.ssd.skip_dims == 1)
                                             else g.ssd.skip[t.head, row])

    def sum_skip(self, c, mine):
        """A chunk's part of D's gradient: x times v, added up before it comes to the others."""
        if self.ssd.skip_gradient:
            for r in range(2):
                of_row = [i for i in range(cute.size(c.x.tensor)) if i // 2 % 2 == r]
                products = [Float32(c.x.tensor[i]) * Float32(c.v.tensor[i]) for i in of_row]
                mine[1].tensor[r] = mine[1].tensor[r] + sum(products[1:], products[0])

    def finish(self, c, s, mine, stage, read_values):
        """c.x = a chunk's outputs, rounded, from c.o, c.v and z, which is in c.x; summed, c.o, in fp32. With sums of o
        times x values are read anew, and of a wide state: registers had o, x and s."""
        if not self.finishes:
            return
        if self.apart or self.spec.head_dim > NARROW:
            read_values()
        if self.apart:
            self.add_diagonal(c, s.diagonal, stage)
        self.sum_skip(c, mine)
        skip = mine[0] if self.skips else 0.0
        d = 1.0
        if self.gets:
            tk.load_shared_cols(c.beta, s.gate.dt[None, stage])
            d = c.beta
        if not self.spec.summed:
            tk.apply_narrow(c.x, self.output, c.o, c.v, c.x, d, skip)
        elif self.gets:
            tk.mul_col(c.o, c.o, d)

    def output(self, o, v, z, d, skip):
        """An element of the outputs."""
        if self.gets:
            o = o * d
        if self.skips:
            o = o + skip * v
        if self.gated:
            o = o * z * cute.arch.rcp_approx(1.0 + cute.math.exp2(-tk.LOG2E * z, fastmath=True))
        return o

    def result(self, c, plain):
        """What goes to global memory: `plain`, where there is nothing to finish."""
        return c.x if self.finishes and not self.spec.summed else plain

    @cute.jit
    def put_skip(self, g, t, mine, row0):
        """D's gradient, once the last chunk is in it."""
        if const_expr(self.there and self.ssd.skip_gradient):
            tk.quad_sum(mine[1])
            for r in cutlass.range_constexpr(2):
                row = row0 + tk.first_row() + 8 * r
                if row < self.spec.value_dim and tk.lane_id() % 4 == 0 and t.state >= 0:
                    g.ssd.of_skip[t.state, t.head, row] = mine[1].tensor[r]

