"""The online softmax of scores whose exponentials become e4m3."""
import math

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, const_expr

import tkq.tile as tk
from tkq.attention.forward.softmax import LEFT, RIGHT, Softmax, largest_of_bits
from tkq.tile.float8 import group_elements

# An exponent of 2. e4m3 goes from 448 down to 2 ** -9: so a row's largest probability becomes the largest power of 2,
# which cancels out in the end, and is exact, as it should be where one key has most of the weight.
SHIFT = 8.0


class Fp8Softmax:
    """As ``Softmax`` of ``tkq.attention.forward``, whose masks and statistics it has; ``max`` is ``SHIFT`` below the
    largest score that a row has seen, as an exponent. Only where one is larger is more than that decided.
    A norm of registers is summed up before P is rounded: rounding errors of a row's keys mostly cancel each other out.

    The factor of the scores has the descales of q and k in it. It is above 0, so that the integer maximum of
    ``largest_of_bits`` finds the largest score: of negative ones alone it may find any, which is in range where 0 is,
    and max is -SHIFT or more where that is looked at."""

    def __init__(self, spec, config):
        self.spec, self.config, self.base = spec, config, Softmax(spec, config)
        groups, every = range(config.kv // 8), config.software_exp2
        # both rows of a thread have as many
        self.in_software = [n for n in groups if every and (n // 2 + n % 2) % every == every - 1]
        self.others = [n for n in groups if n not in self.in_software]
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
        self.exponentials(g, regs, guarded=True)

    def step(self, g, regs, i, sides):
        """S, the scores of the i-th block of the visit, become exponentials. sides: which need a mask. Did max of a
        row of the warp's move, so that O must be rescaled?"""
        self.base.scores(g, regs, i, sides)
        moved, guarded = self.out_of_range(g, regs), bool(sides & RIGHT)
        self.move_if(g, regs, moved, guarded)
        if self.config.hand_over == "range":
            regs.ping_pong.give()
        self.exponentials(g, regs, guarded)
        return moved

    @cute.jit
    def out_of_range(self, g, regs):
        found, scores = cutlass.Boolean(False), regs.s.rows_view
        for r in cutlass.range_constexpr(2):
            top = largest_of_bits([scores[r, j] for j in range(regs.s.cols // 4)])
            row_max = regs.max.tensor[r]
            found = found | (row_max < -SHIFT) | (top * self.factor(g, regs) - row_max > SHIFT)
            if const_expr(self.in_software):
                found = found | (top != top)
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
        self.raise_max(g, regs)
        self.base.find_shift(regs, guarded)
        tk.sub(regs.correct, regs.correct, regs.shift)
        tk.exp2(regs.correct, regs.correct)
        if self.config.row_sum == "registers":
            tk.mul(regs.norm, regs.norm, regs.correct)

    @cute.jit
    def raise_max(self, g, regs):
        """To shift, the largest scores."""
        for r in cutlass.range_constexpr(2):
            row_max, found = regs.max.tensor[r], regs.shift.tensor[r]
            stays = (row_max >= -SHIFT) & (found - row_max <= SHIFT)
            regs.max.tensor[r] = row_max if stays else cute.arch.fmax(row_max, found - SHIFT)
            if const_expr(self.in_software):
                self.keep_nan(g, regs, r)

    def keep_nan(self, g, regs, r):
        """To max, whose maximum takes numbers: and so to exponentials of MUFU, as those made in software cannot be NaN.
        Of scores that are NaN or, times the factor, infinite."""
        top = largest_of_bits([regs.s.rows_view[r, j] for j in range(regs.s.cols // 4)]) * self.factor(g, regs)
        regs.max.tensor[r] = cutlass.select_(top < math.inf, regs.max.tensor[r], Float32(math.nan))

    def exponentials(self, g, regs, guarded):
        """S becomes exp2(factor * S - shift), which is 0 for a score of -inf; norm moves on. guarded: see move.
        Groups in software stay scores, until ``narrow``."""
        self.base.find_shift(regs, guarded)
        if self.in_software:
            self.exponentials_of(regs, self.factor(g, regs))
            return
        tk.mul(regs.s, regs.s, self.factor(g, regs))  # one FFMA with the next line
        tk.sub_row(regs.s, regs.s, regs.shift)
        tk.apply(regs.s, lambda x: cute.math.exp2(x, fastmath=True), regs.s)
        if self.config.row_sum == "registers":
            tk.row_sum_partial(regs.norm, regs.s, regs.norm)

    def exponentials_of(self, regs, factor):
        """Of all groups but those in software."""
        s = regs.s.tensor
        for group in self.others:
            for i in group_elements(group):
                s[i] = cute.math.exp2(s[i] * factor - regs.shift.tensor[group % 2], fastmath=True)

    def narrow(self, g, regs):
        """P, of what exponentials left in S."""
        tk.copy_e4m3(regs.p, regs.s, self.others)
        if self.in_software:
            tk.exp2_e4m3(regs.p, regs.s, self.factor(g, regs), regs.shift, self.in_software)

    def statistics(self, g, regs, lse):
        """lse from max and norm; the norm becomes what O is multiplied by in the end: its reciprocal, or 0 for a row
        that saw no key, times the descale of v."""
        self.base.statistics(g, regs, lse)
        if const_expr("v" in self.spec.descales):
            tk.mul(regs.last_norm, regs.last_norm, regs.factors[1])
