"""Masks, the online softmax and its statistics: what a consumer does with a tile of scores in its registers."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

import tkq.tile as tk
from tkq.attention.ranges import limits_in_block
from tkq.attention.state import extent

RIGHT, LEFT = 1, 2  # sides of a mask


class Softmax:
    """``max`` is the largest score that a row has seen, not scaled yet; ``norm`` this thread's part of the sum of
    exponentials; ``correct`` what O and the norm so far are owed when the maximum moves. Exponentials are base 2."""

    def __init__(self, spec, config):
        self.spec, self.config = spec, config

    def first(self, g, c):
        """The first block of a visit."""
        tk.zero(c.norm)
        tk.neg_infty(c.max)
        self.step(g, c, 0, RIGHT | LEFT)

    def step(self, g, c, i, sides):
        """att, the scores of the i-th block of the visit, become exponentials. sides: which need a mask."""
        if self.spec.softcap:  # softcap * tanh(scale * att / softcap); the first factor is in g.scale
            tk.mul(c.att, c.att, g.cap)
            tk.tanh(c.att, c.att)
        if sides:
            self.mask(g, c, i, sides)
        # Rows that have seen no key yet are only in blocks with a mask on the right.
        self.exponentials(g, c, guarded=bool(sides & RIGHT) and self.spec.sides, masked=bool(sides))

    def limits(self, g, c, i):
        """``limits_in_block`` of the warpgroup's first row and the i-th block of the visit."""
        spec, pack = self.spec, self.spec.pack
        block = c.task["blocks"] - 1 - i
        if spec.left:
            block = block + c.task["first"]
        row = c.task["tile"] * (self.config.rows // pack) + c.wg * (64 // pack)
        return limits_in_block(extent(spec, self.config, g, *g.tasks.lengths(c.task)), row, block)

    @cute.jit
    def mask(self, g, c, i, sides: Constexpr[int]):
        """The scores of keys that a row does not see become -inf."""
        spec, pack = self.spec, self.spec.pack
        first, end, most = self.limits(g, c, i)
        if const_expr(sides & RIGHT):
            if const_expr(spec.causal):  # what a row sees ends where the keys do, or before
                tk.right_fill(c.att, end, -Float32.inf, diagonal=pack)
            elif const_expr(spec.right):
                tk.right_fill(c.att, end, -Float32.inf, diagonal=pack, end=most)
            else:
                tk.right_fill(c.att, most, -Float32.inf)
        if const_expr(spec.left and sides == LEFT):
            tk.left_fill(c.att, first, -Float32.inf, diagonal=pack)
        elif const_expr(spec.left and sides & LEFT and not spec.far):
            if first + 63 // pack > 0:  # few tasks are so short that a block needs both
                tk.left_fill(c.att, first, -Float32.inf, diagonal=pack)

    def exponentials(self, g, c, guarded, masked):
        """att becomes exp2(scale * (att - max)); max and norm move on.

        guarded: a row may have seen no key yet. masked: there may be scores of -inf, whose exponentials must be 0."""
        tk.copy(c.correct, c.max)
        tk.row_max(c.max, c.att, c.max)
        if guarded:
            tk.finite_or_zero(c.max_scaled, c.max)
        else:
            tk.copy(c.max_scaled, c.max)
        tk.sub(c.correct, c.correct, c.max_scaled)
        tk.mul(c.correct, c.correct, g.scale)
        tk.exp2(c.correct, c.correct)
        tk.mul(c.max_scaled, c.max_scaled, g.scale)
        tk.mul(c.att, c.att, g.scale)  # one FFMA with the next line
        tk.sub_row(c.att, c.att, c.max_scaled)
        tk.exp2(c.att, c.att)
        tk.mul(c.norm, c.norm, c.correct)
        tk.row_sum_partial(c.norm, c.att, c.norm)

    # ---- of a whole row ------------------------------------------------------------------------

    @cute.jit
    def statistics(self, g, c, lse):
        """lse from max and norm; the norm becomes its reciprocal, or 0 for a row that saw no key."""
        tk.quad_sum(c.last_norm)
        for r in cutlass.range_constexpr(2):
            if const_expr(self.spec.sinks is None):
                norm = c.last_norm.tensor[r]
                empty = norm == Float32(0.0)
                c.last_norm.tensor[r] = Float32(0.0) if empty else cute.arch.rcp_approx(norm)
                lse.tensor[r] = -Float32.inf if empty else (
                    c.last_max.tensor[r] * g.scale + cute.math.log2(norm, fastmath=True)) * tk.LN2
            else:
                self.with_sink(g, c, lse, r)

    @cute.jit
    def with_sink(self, g, c, lse, r):
        """The same, of row r, with one more logit in the sum."""
        pack = self.spec.pack
        head = c.last["head"] if const_expr(pack == 1) else (
            c.last["head"] * pack + (tk.first_row() + 8 * r) % pack)
        sink = Float32(g.sinks[head]) * tk.LOG2E
        row = c.last_max.tensor[r] * g.scale
        top = cutlass.max(row, sink)
        top = Float32(0.0) if top == -Float32.inf else top
        weight = cute.math.exp2(row - top, fastmath=True)
        norm = c.last_norm.tensor[r] * weight + cute.math.exp2(sink - top, fastmath=True)
        empty = norm == Float32(0.0)  # no key, and a sink of -inf
        c.last_norm.tensor[r] = Float32(0.0) if empty else weight * cute.arch.rcp_approx(norm)
        lse.tensor[r] = -Float32.inf if empty else (top + cute.math.log2(norm, fastmath=True)) * tk.LN2
