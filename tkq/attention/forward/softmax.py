"""Masks, the online softmax and its statistics: what a consumer does with a tile of scores in its registers."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.mask import limits_in_block
from tkq.attention.forward.state import extent

RIGHT, LEFT = 1, 2  # sides of a mask
# Exponents of 2: how far a row's scores may go beyond what is subtracted from them; the least that is, unless the row's
# scores are so far below it that P, in 16 bits, would lose keys of them. fp16 would at once: what is 2 ** -17 of
# 2 ** -8 is 0 there, and many such keys are a large part of a row.
RESCALE_THRESHOLD = 8.0
LEAST = 1.0 - RESCALE_THRESHOLD
BELOW = {"bf16": 64.0, "fp16": 0.0}


class Softmax:
    """Exponentials are base 2. ``max`` stands for the largest score that a row has seen, as an exponent: it is
    subtracted from the exponents, and cancels out in the end, whatever it is. So it stays, and with it O and the norm
    so far, as long as no score goes more than ``RESCALE_THRESHOLD`` beyond it (as in FlashAttention-4; 2 ** 8 loses
    nothing in 16 or 32 bits). ``norm`` is this thread's part of the sum of exponentials; ``correct``: the factor that
    rescales O and the row sum when the running max changes; ``shift`` what is subtracted: max, or 0 for a row that has
    seen no key.

    Whether scores are in range is decided by an integer maximum of their bits, three at once by one instruction.
    Integer compare orders positive floats; if all scores are negative it may return any of them, which cannot trigger a
    false "in range" as long as 0 is in range, too: max is seldom below ``LEAST``."""

    def __init__(self, spec, config):
        self.spec, self.config = spec, config

    def state(self, smem):
        """What it knows of blocks of keys beside a consumer's own registers: nothing."""

    def first(self, g, regs):
        """The first block of a visit."""
        tk.zero(regs.norm)
        tk.neg_infty(regs.max)
        self.scores(g, regs, 0, RIGHT | LEFT)
        self.move(g, regs, guarded=True)
        self.exponentials(g, regs, guarded=True)

    def step(self, g, regs, i, sides):
        """S, the scores of the i-th block of the visit, become exponentials. sides: which need a mask. Did max of a
        row of the warp's move, so that O must be rescaled?"""
        self.scores(g, regs, i, sides)
        moved, guarded = self.out_of_range(g, regs), bool(sides & RIGHT)
        self.move_if(g, regs, moved, guarded)
        self.exponentials(g, regs, guarded)
        return moved

    def scores(self, g, regs, i, sides):
        if self.spec.softcap:  # softcap * tanh(scale * S / softcap); the first factor is in g.scale
            tk.mul(regs.s, regs.s, g.cap)
            tk.tanh(regs.s, regs.s)
        if sides:
            self.mask(g, regs, i, sides)

    def limits(self, g, regs, i):
        """``limits_in_block`` of the warpgroup's first row and the i-th block of the visit."""
        spec, pack = self.spec, self.spec.pack
        block = regs.task["blocks"] - 1 - i
        if spec.left:
            block = block + regs.task["first"]
        row = regs.task["tile"] * (self.config.rows // pack) + regs.wg * (64 // pack)
        return limits_in_block(extent(spec, self.config, g, *g.tasks.lengths(regs.task)), row, block)

    @cute.jit
    def mask(self, g, regs, i, sides: Constexpr[int]):
        """The scores of keys that a row does not see become -inf."""
        spec, pack = self.spec, self.spec.pack
        first, end, most = self.limits(g, regs, i)
        if const_expr(sides & RIGHT):
            if const_expr(spec.causal):  # what a row sees ends where the keys do, or before
                tk.right_fill(regs.s, end, -Float32.inf, diagonal=pack)
            elif const_expr(spec.right):
                tk.right_fill(regs.s, end, -Float32.inf, diagonal=pack, end=most)
            else:
                tk.right_fill(regs.s, most, -Float32.inf)
        if const_expr(spec.left and sides == LEFT):
            tk.left_fill(regs.s, first, -Float32.inf, diagonal=pack)
        elif const_expr(spec.left and sides & LEFT and not spec.long_window):
            if first + 63 // pack > 0:  # few tasks are so short that a block needs both
                tk.left_fill(regs.s, first, -Float32.inf, diagonal=pack)

    @cute.jit
    def out_of_range(self, g, regs, also=False):
        """Of any row of the warp. also: of this thread, whatever its scores are."""
        found, scores = cutlass.Boolean(also), regs.s.rows_view
        for r in cutlass.range_constexpr(2):
            top = largest_of_bits([scores[r, j] for j in range(regs.s.cols // 4)])
            row_max = regs.max.tensor[r]
            found = found | (row_max < -RESCALE_THRESHOLD) | (top * g.scale - row_max > RESCALE_THRESHOLD)
        return cute.arch.vote_any_sync(found)

    @cute.jit
    def move_if(self, g, regs, moved, guarded: Constexpr[bool]):
        if moved:
            self.move(g, regs, guarded)

    def move(self, g, regs, guarded):
        """Where scores are out of range, max becomes the largest, or ``LEAST``, and norm moves on with it. Other rows
        stay as they are: what comes out for a row does not depend on those beside it.

        guarded: a row may have seen no key yet. There are such only in blocks with a mask on the right."""
        tk.copy(regs.correct, regs.max)
        tk.row_max(regs.shift, regs.s)
        tk.mul(regs.shift, regs.shift, g.scale)
        self.raise_max(regs)
        self.find_shift(regs, guarded)
        tk.sub(regs.correct, regs.correct, regs.shift)
        tk.exp2(regs.correct, regs.correct)
        tk.mul(regs.norm, regs.norm, regs.correct)

    def find_shift(self, regs, guarded):
        if guarded and self.spec.sides:
            tk.finite_or_zero(regs.shift, regs.max)
        else:
            tk.copy(regs.shift, regs.max)

    @cute.jit
    def raise_max(self, regs):
        """To shift, the largest scores."""
        for r in cutlass.range_constexpr(2):
            row_max, found = regs.max.tensor[r], regs.shift.tensor[r]
            stays = (row_max >= -RESCALE_THRESHOLD) & (found - row_max <= RESCALE_THRESHOLD)
            top = cute.arch.fmax(row_max, found)
            near = top >= LEAST - BELOW[self.spec.dtype]
            top = cute.arch.fmax(top, Float32(LEAST)) if near else top
            regs.max.tensor[r] = row_max if stays else top

    def exponentials(self, g, regs, guarded):
        """S becomes exp2(scale * S - shift), which is 0 for a score of -inf; norm moves on. guarded: see move."""
        self.find_shift(regs, guarded)
        tk.mul(regs.s, regs.s, g.scale)  # one FFMA with the next line
        tk.sub_row(regs.s, regs.s, regs.shift)
        tk.exp2(regs.s, regs.s)
        tk.row_sum_partial(regs.norm, regs.s, regs.norm)

    # ---- of a whole row ------------------------------------------------------------------------

    @cute.jit
    def statistics(self, g, regs, lse):
        """lse from max and norm; the norm becomes its reciprocal, or 0 for a row that saw no key."""
        tk.quad_sum(regs.last_norm)
        for r in cutlass.range_constexpr(2):
            if const_expr(self.spec.sinks is None):
                norm = regs.last_norm.tensor[r]
                empty = norm == Float32(0.0)
                regs.last_norm.tensor[r] = Float32(0.0) if empty else cute.arch.rcp_approx(norm)
                lse.tensor[r] = -Float32.inf if empty else (
                    regs.last_max.tensor[r] + cute.math.log2(norm, fastmath=True)) * tk.LN2
            else:
                self.with_sink(g, regs, lse, r)

    @cute.jit
    def with_sink(self, g, regs, lse, r):
        """The same, of row r, with one more logit in the sum."""
        pack = self.spec.pack
        head = regs.last["head"] if const_expr(pack == 1) else (
            regs.last["head"] * pack + (tk.first_row() + 8 * r) % pack)
        sink = Float32(g.sinks[head]) * tk.LOG2E
        row = regs.last_max.tensor[r]
        top = cutlass.max(row, sink)
        top = Float32(0.0) if top == -Float32.inf else top
        weight = cute.math.exp2(row - top, fastmath=True)
        norm = regs.last_norm.tensor[r] * weight + cute.math.exp2(sink - top, fastmath=True)
        empty = norm == Float32(0.0)  # no key, and a sink of -inf
        regs.last_norm.tensor[r] = Float32(0.0) if empty else weight * cute.arch.rcp_approx(norm)
        lse.tensor[r] = -Float32.inf if empty else (top + cute.math.log2(norm, fastmath=True)) * tk.LN2


def largest_of_bits(x):
    """The largest of floats x if one of them is positive, else any of them. Two chains, three at once."""
    bits = [v.bitcast(Int32) for v in x]
    n = len(bits) // 2
    found = [of_three(bits[:n]), of_three(bits[n:])]
    return cutlass.max(*found).bitcast(Float32)


def of_three(bits):
    """The largest: the assembler makes one instruction of two comparisons."""
    found = bits[0]
    for j in range(1, len(bits) - 1, 2):
        found = cutlass.max(cutlass.max(found, bits[j]), bits[j + 1])
    return cutlass.max(found, bits[-1]) if len(bits) % 2 == 0 else found
