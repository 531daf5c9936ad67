"""Scores of a chunk's tokens: the part of `LinearAttention` that multiplies queries and keys, and stores P."""
from functools import partial
from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, const_expr

import tkq.tile as tk
from tkq.linear_attention.spec import LinearSpec


class Scores:
    """Q K' in accumulators, and P without those of tokens that a query does not see. With the delta rule alone, K K'
    in the place of the first."""

    def __init__(self, spec: LinearSpec, delta: Any, apart: bool):
        """apart: a token does not see itself."""
        self.spec, self.delta, self.apart = spec, delta, int(apart)
        # is the half that is seen made by itself? Of the delta rule, and in two parts, there are more steps behind it
        self.half = not (spec.delta or spec.exact_scores)

    @cute.jit
    def begin(self, s, t, i, ring, x: tk.RegTile, now: Constexpr[bool]):
        """The i-th chunk's product is under way; behind the last chunk there is one of whatever lies there, not used.
        """
        if const_expr(now):
            if i < t.chunks:
                s.tokens.wait(ring)
            if const_expr(self.spec.scored):
                tk.mm_ABt(x, s.q[ring.stage], s.k[ring.stage])
            else:
                self.delta.products(x, s.k[ring.stage])

    def weigh(self, gate, p, x, between, scale):
        """p = scores, of which `put` stores those that are seen."""
        if self.half:
            gate.weigh(p, x, between, scale, partial(tk.apply_triangle, apart=self.apart, upper=self.spec.reverse))
        else:
            gate.weigh(p, x, between, scale)

    def put(self, tile, p, apart=None):
        """P to shared memory. apart: by how many tokens those are apart that see each other, at least."""
        if not self.half or apart is not None:
            self.hide(p, self.apart if apart is None else apart)
        tk.store(tile, p)

    def hide(self, p, apart):
        """0 for those that are not seen."""
        if self.spec.reverse:
            tk.left_fill(p, apart, 0.0, diagonal=True)
        else:
            tk.right_fill(p, 1 - apart, 0.0, diagonal=True)
