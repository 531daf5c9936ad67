"""What a norm takes from gradients: the part of `BasedGradient` that knows of it."""
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.based import features
from tkq.linear_attention.based.layout import MOMENTS as WIDTH
from tkq.linear_attention.based.spec import GradientSpec
from tkq.linear_attention.config import CHUNK


class MomentsShared(NamedTuple):
    """weighted: of a chunk's y, two stages. x, high, low: of each stage that is ready, what is multiplied."""

    weighted: tk.SharedTile
    x: tk.SharedTile
    high: tk.SharedTile
    low: tk.SharedTile


@dataclass(frozen=True)
class Registers:
    """sum: the moments of the chunks before. weighted: a chunk's rows of y with their weights; wide, high, low: on the
    way to it, and of sum as operands."""

    sum: tk.RegTile
    weighted: tk.RegTile
    wide: tk.RegTile
    high: tk.RegTile
    low: tk.RegTile
    weight: tk.RowVec


class Moments:
    """The sum of a[j] (1 + s[j]) y[j] over the chunks before, s[j] = scale * x y[j], is

        m + scale M x,   m the sum of a[j] y[j], M the sum of a[j] y[j] y[j]'

    a is 1 for q's gradient and delta for k's. a y goes to the tensor cores in two parts of 16 bits, one below the other
    in M = [a y, a]' [y, 1], and so do m and M when x is multiplied: x stands in its operand twice. Lost is only what
    the second parts leave."""

    def __init__(self, spec: GradientSpec, dtype: Any):
        self.norm, self.reverse, self.dtype = spec.norm, spec.reverse, dtype
        self.tile, self.x_tile = tk.st(CHUNK, WIDTH, dtype), tk.st(CHUNK, 2 * WIDTH, dtype)

    def shared(self, al: tk.SharedAllocator, stages) -> Any:
        """Room for them in shared memory; None without a norm."""
        if not self.norm:
            return None
        return MomentsShared(al.tile(self.x_tile, 2), al.tile(self.x_tile, stages), al.tile(self.tile, stages),
                             al.tile(self.tile, stages))

    # ---- the features' warpgroup ----------------------------------------------------------------

    def begin(self) -> Any:
        """Registers."""
        if not self.norm:
            return None
        m = Registers(tk.rt_fl(WIDTH), tk.rt(2 * WIDTH, self.dtype), tk.rt_fl(WIDTH), tk.rt(WIDTH, self.dtype),
                      tk.rt(WIDTH, self.dtype), tk.rv())
        tk.zero(m.sum)
        return m

    def put_sum(self, m, shared, scale, chunks, stage):
        """The moments as operands. chunks: how many they are of."""
        if self.norm:
            self.narrow(m, scale, chunks)
            tk.store(shared.high[stage], m.high)
            tk.store(shared.low[stage], m.low)

    def narrow(self, m, scale, chunks):
        times, _ = features.tokens_near(chunks)
        # rows 0 to 15 and 32 to 47 are of y, the others of 1
        weight = Float32(cutlass.select_(tk.warp_id() % 2 == 0, scale * scale, scale)) * times
        tk.apply_narrow(m.high, lambda x: x * weight, m.sum)
        tk.apply_narrow(m.low, lambda x, high: x * weight - high, m.sum, m.high)

    def put_x(self, m, shared, x, stage):
        """x's rows, twice. x: a `Row`."""
        if self.norm:
            self.twice(m, x)
            tk.store(shared.x[stage], m.weighted)

    def twice(self, m, x):
        words = cute.recast_tensor(m.weighted.tensor, Int32)
        for r in range(2):
            for block, word in enumerate([x.pair(r, 0), x.pair(r, 2), features.one(x, self.dtype), Int32(0)] * 2):
                words[2 * block + r] = word

    def put_weighted(self, m, shared, g, t, where, y):
        """A chunk's y with weights. y: the first tile of its features. where: (the chunk, how many were before)."""
        if self.norm:
            self.weigh(m, g, t, where[0], y)
            tk.store(shared.weighted[where[1] % 2], m.weighted)

    def weigh(self, m, g, t, chunk, y):
        words = cute.recast_tensor(m.weighted.tensor, Int32)
        tk.copy(m.high, tk.columns(y, 0, WIDTH))
        if self.reverse:
            tk.load_rows(m.weight, g.delta[t.batch, None, t.head], chunk * CHUNK, g.tokens)
            tk.mul(m.weight, m.weight, Float32(cutlass.select_(t.part == 0, Float32(1.0), Float32(0.0))))
            tk.copy(m.wide, m.high)
            tk.mul_row(m.wide, m.wide, m.weight)
            tk.copy(m.high, m.wide)
            tk.apply_narrow(m.low, lambda x, high: x - high, m.wide, m.high)
        high, low = (cute.recast_tensor(part.tensor, Int32) for part in (m.high, m.low))
        for block in range(4):
            for r in range(2):
                at, there = 2 * block + r, block < 3  # the fourth has products of two columns
                words[at] = high[at] if there else Int32(0)
                words[8 + at] = low[at] if there and self.reverse else Int32(0)

    def products(self, m, shared, y: tk.SharedTile, i):
        """Start to add the chunk's own."""
        if self.norm:
            tk.mma_AtB(m.sum, shared.weighted[i % 2], y, b_part=0)

    # ---- the gradients' warpgroup ---------------------------------------------------------------

    def of_x(self, found: tk.RegTile, shared, stage):
        """Start scale (m + scale M x), divided by a power of 2."""
        if self.norm:
            tk.mm_AB(found, shared.x[stage], shared.high[stage])
            tk.mma_AB(found, shared.x[stage], shared.low[stage])

    @cute.jit
    def deltas(self, c, g, t, chunk):
        """Of the tokens that are summed over, or of the rows themselves; 0 but for the first columns of V."""
        if const_expr(self.norm):
            delta = g.delta[t.batch, None, t.head]
            there = Float32(cutlass.select_(t.part == 0, Float32(1.0), Float32(0.0)))
            if const_expr(self.reverse):
                tk.load_cols(c.cols, delta, chunk * CHUNK, g.tokens)
                tk.mul(c.cols, c.cols, there)
            else:
                tk.load_rows(c.rows, delta, chunk * CHUNK, g.tokens)
                tk.mul(c.rows, c.rows, there)

    def less(self, c):
        """Of products of do and v what the weights' sums take, in the operands of `apply_narrow`."""
        if not self.norm:
            return 0.0
        return c.cols if self.reverse else c.rows

    def taken(self, c, r, j):
        """Of a row's j-th column of this thread's."""
        if not self.norm:
            return Float32(0.0)
        found = c.of_moments.rows_view[r, j]
        return found if self.reverse else found * c.rows.tensor[r]
