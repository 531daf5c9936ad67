"""The online softmax of scores whose exponentials become e4m3."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.attention.forward.softmax import LEFT, RIGHT, Softmax, largest_of_bits

# An exponent of 2. e4m3 goes from 448 down to 2 ** -9: so a row's largest probability becomes the largest power of 2,
# which cancels out in the end, and is exact, as it should be where one key has most of the weight.
SHIFT = 8.0


class Fp8Softmax:
    """As ``Softmax`` of ``tkq.attention.forward``, whose masks and statistics it has; ``max`` is the largest score that
    a row has seen, as an exponent, and only where one is larger is more than that decided. P is multiplied by 2 **
    SHIFT as it is rounded (``copy_e4m3_scaled``), and O by its inverse in the end; without ``halves`` max is ``lift``,
    as much, below the largest score.
    The norm is summed up before P is rounded: rounding errors of a row's keys mostly cancel each other out.

    The factor of the scores has the descales of q and k in it. It is above 0, so that the integer maximum of
    ``largest_of_bits`` finds the largest score: of negative ones alone it may find any, which is in range where 0 is,
    and max is -lift or more where that is looked at."""

    def __init__(self, spec, config):
        self.spec, self.config, self.base = spec, config, Softmax(spec, config)
        self.lift = 0.0 if config.halves else SHIFT
        self.scaled = "q" in spec.descales or "k" in spec.descales

    def factor(self, g, regs):
        """What the scores are multiplied by."""
        return regs.factors[0] if self.scaled else g.scale

    def first(self, g, regs):
        """The first block of a visit."""
        tk.zero(regs.norm)
        tk.neg_infty(regs.max)
        self.base.scores(g, regs, 0, RIGHT | LEFT)
        self.move(g, regs, guarded=True)
        self.exponentials(g, regs, RIGHT | LEFT, 0, regs.s.cols)

    def step(self, g, regs, i, sides):
        """S, the scores of the i-th block of the visit, become exponentials. sides: which need a mask. Did max of a
        row of the warp's move, so that O must be rescaled?"""
        moved = self.look(g, regs, i, sides)
        self.exponentials(g, regs, sides, 0, regs.s.cols)
        return moved

    def look(self, g, regs, i, sides):
        """What comes before the exponentials: the mask, and max of those rows whose scores it is too far below. correct
        becomes what that takes from O, 1 of the other rows."""
        self.base.scores(g, regs, i, sides)
        tk.fill(regs.correct, 1.0)
        moved = self.out_of_range(g, regs)
        self.move_if(g, regs, moved, bool(sides & RIGHT))
        return moved

    @cute.jit
    def out_of_range(self, g, regs):
        found, scores = cutlass.Boolean(False), regs.s.rows_view
        for r in cutlass.range_constexpr(2):
            top = largest_of_bits([scores[r, j] for j in range(regs.s.cols // 4)])
            row_max = regs.max.tensor[r]
            found = found | (row_max < -self.lift) | (top * self.factor(g, regs) - row_max > self.lift)
        return cute.arch.vote_any_sync(found)

    @cute.jit
    def move_if(self, g, regs, moved, guarded: Constexpr[bool]):
        if moved:
            self.move(g, regs, guarded)

    def move(self, g, regs, guarded):
        """Where scores are out of range, max follows the largest, and norm with it. Other rows stay as they are: what
        comes out for a row does not depend on those beside it.

        guarded: a row may have seen no key yet. There are such only in blocks with a mask on the right."""
        tk.copy(regs.correct, regs.max)
        tk.row_max(regs.shift, regs.s)
        tk.mul(regs.shift, regs.shift, self.factor(g, regs))
        self.raise_max(regs)
        self.base.find_shift(regs, guarded)
        tk.sub(regs.correct, regs.correct, regs.shift)
        tk.exp2(regs.correct, regs.correct)
        tk.mul(regs.norm, regs.norm, regs.correct)

    @cute.jit
    def raise_max(self, regs):
        """To shift, the largest scores."""
        for r in cutlass.range_constexpr(2):
            row_max, found = regs.max.tensor[r], regs.shift.tensor[r]
            stays = (row_max >= -self.lift) & (found - row_max <= self.lift)
            regs.max.tensor[r] = row_max if stays else cute.arch.fmax(row_max, found - self.lift)

    def exponentials(self, g, regs, sides, first, n):
        """n columns of S become exp2(factor * S - shift), which is 0 for a score of -inf; norm moves on. Each
        ``polynomial``-th by one, where no score is -inf."""
        s = tk.columns(regs.s, first, n)
        self.base.find_shift(regs, bool(sides & RIGHT))
        tk.mul(s, s, self.factor(g, regs))  # one FFMA with the next line
        tk.sub_row(s, s, regs.shift)
        tk.exp2_polynomial(s, s, 0 if sides else self.config.polynomial)
        tk.row_sum_partial(regs.norm, s, regs.norm)

    def statistics(self, g, regs, lse):
        """lse from max and norm; the norm becomes what O is multiplied by in the end: its reciprocal, or 0 for a row
        that saw no key, times the descale of v."""
        self.base.statistics(g, regs, lse)
        if const_expr("v" in self.spec.descales):
            tk.mul(regs.last_norm, regs.last_norm, regs.factors[1])
        if const_expr(self.config.halves):
            tk.mul(regs.last_norm, regs.last_norm, 2.0 ** -SHIFT)
