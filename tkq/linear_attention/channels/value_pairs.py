"""Two passes of `ChannelValues` in one: of one state, or of two that add up."""
import cutlass
import cutlass.cute as cute
from cutlass import const_expr

import tkq.tile as tk
from tkq.linear_attention.channels.columns import HALVES


class ValuePairs:
    """The delta rule's gradients of q, k and gates (`delta.channel_gradients`) are four passes of u, the corrected
    values, in two of which a pair of tokens has the same state; those of the second lack the diagonal:

        not reversed   o = scale * S' q                     S of keys k and values v
                       o2 = -S' second, strict              dots = x o + v o2
        reversed       o = (scale * S - S2)' q (+ rest)     S of keys k and values v; S2, strict, of second and v2
                       dots = v2 o                          without rest

    Reversed, initial is of scale * S - S2, which the accumulators have with its sign turned, so that S2's products add
    up in them; S's come from registers of their own, where they are multiplied by scale, each once."""

    def __init__(self, state):
        """state: the `ValueState` whose chunks these are."""
        self.state, self.reverse = state, state.spec.reverse

    # ---- a chunk by one product ------------------------------------------------------------------

    @cute.jit
    def add_whole(self, c, g, s, ring, steps):
        """As `ValueState.add_whole`."""
        of, stage, at, ends = self.state, steps.stage, ring.stage, s.ends[None, steps.stage]
        of.decay(c, ends, 0)
        of.narrow_state(c)
        of.multiply_state(c, c.o, s.q[at])
        pairs, others = (s.p[stage], s.carried[stage]), (s.p2[stage], s.carried2[stage])
        if const_expr(self.reverse):
            tk.mma_wait(0)  # the state's operands have left their registers
            of.carry(c.v, s.v[at], s.factors, stage)
            of.multiply_pairs(c.o2, c.v, pairs, True)
            self.add_first(c, g, s.k[at])
            of.carry(c.left, s.v2[at], s.factors, stage)
            of.multiply_pairs(c.o, c.left, others)
            tk.mma_AB(c.s, c.left, s.second[at])
            tk.mma_wait(0)
            tk.load_T(c.x, s.v2[at])
            s.tokens.release(ring)
            of.begin_dots(c)
            of.give(c, c.o, lambda r, j: c.o2.rows_view[r, j] * g.scale - c.o.rows_view[r, j], s.factors, stage)
        else:
            of.multiply_state(c, c.o2, s.second[at])
            tk.mma_wait(0)
            of.carry(c.v, s.v[at], s.factors, stage)
            of.multiply_pairs(c.o, c.v, pairs)
            of.multiply_pairs(c.o2, c.v, others)
            tk.mma_AB(c.s, c.v, s.k[at])
            tk.mma_wait(0)
            tk.load_T(c.x, s.x[at])
            tk.load_T(c.v, s.v[at])
            s.tokens.release(ring)
            of.begin_dots(c)
            of.give(c, c.o, lambda r, j: c.o.rows_view[r, j] * g.scale, s.factors, stage)
            tk.copy(c.x, c.v)
            of.give(c, c.o2, lambda r, j: -c.o2.rows_view[r, j], s.factors, stage)
        of.decay(c, ends, 1)
        of.next(s, steps)

    def add_first(self, c, g, keys):
        """What the first keys add to the state, reversed, a part of it at a time."""
        for part in range(c.s.cols // c.fresh.cols):
            tk.mm_AB(c.fresh, c.v, keys, **(dict(b_part=part) if c.fresh.cols < c.s.cols else {}))
            tk.mma_wait(0)
            self.take_fresh(c, g.scale, part)

    def take_fresh(self, c, scale, part):
        """It is there."""
        state, fresh = c.s.rows_view, c.fresh.rows_view
        for r in range(2):
            for j in range(c.fresh.cols // 4):
                at = part * c.fresh.cols // 4 + j
                state[r, at] = cute.math.fma(fresh[r, j], -scale, state[r, at])

    # ---- a chunk by levels -----------------------------------------------------------------------

    @cute.jit
    def add_levels(self, c, g, s, ring, steps):
        """As `ValueState.add_levels`; the second pairs come with their sign."""
        of, at = self.state, ring.stage
        of.of_state(c, c.o, s.q[at])
        if const_expr(not self.reverse):
            of.of_state(c, c.o2, s.second[at])
        of.decay(c, s.ends[None, steps.stage], 0)
        of.begin_dots(c)
        self.load_x(c, s, at)
        if const_expr(self.reverse):
            of.give(c, c.o, lambda r, j: -c.o.rows_view[r, j], s.factors, steps.stage)
            tk.load_T(c.v, s.carried[steps.stage])
            self.add_first(c, g, s.k[at])
            tk.load_T(c.v, s.carried2[steps.stage])
            tk.mma_AB(c.s, c.v, s.second[at])
            tk.mma_wait(0)
        else:
            of.give(c, c.o, lambda r, j: c.o.rows_view[r, j] * g.scale, s.factors, steps.stage)
            tk.load_T(c.x, s.v[at])
            of.give(c, c.o2, lambda r, j: -c.o2.rows_view[r, j], s.factors, steps.stage)
            tk.load_T(c.v, s.carried[steps.stage])
            tk.mma_AB(c.s, c.v, s.k[at])
            tk.mma_wait(0)
        of.next(s, steps)
        for n in cutlass.range_constexpr(len(HALVES)):
            s.steps.wait(steps)
            tk.load_T(c.v, s.carried[steps.stage])
            self.load_x(c, s, at)
            of.add_level(c, c.o, s, s.p, steps.stage, HALVES[n])
            if const_expr(self.reverse):
                tk.load_T(c.v, s.carried2[steps.stage])
                of.add_level(c, c.o, s, s.p2, steps.stage, HALVES[n])
            else:
                tk.load_T(c.x, s.v[at])
                of.add_level(c, c.o2, s, s.p2, steps.stage, HALVES[n])
            of.next(s, steps)
        s.steps.wait(steps)
        tk.load_T(c.v, s.v[at])
        self.load_x(c, s, at)
        of.add_level(c, c.o, s, s.p, steps.stage, 0)
        of.next(s, steps)
        s.tokens.release(ring)

    def load_x(self, c, s, at):
        """What the outputs are multiplied by; the second ones by v."""
        tk.load_T(c.x, s.v2[at] if self.reverse else s.x[at])
