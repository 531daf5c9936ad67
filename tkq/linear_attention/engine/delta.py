"""The delta rule: what a state already gives for a key is taken off the value (Schlag et al., 2021; Yang et al.,
2024)."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.tile as tk
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine import ahead
from tkq.linear_attention.engine.inverse import PITCH, LowerInverse
from tkq.linear_attention.spec import NARROW, LinearSpec


class DeltaShared(NamedTuple):
    """inverse: (I + L)^-1, 16 bits, two stages. lower: L, fp32, of the scores' warpgroup alone, column by column. beta,
    erase: of a chunk's tokens, beta and beta * 2^G, in the reversed order over the scale, two stages."""

    inverse: tk.SharedTile
    lower: cute.Tensor
    beta: cute.Tensor
    erase: cute.Tensor


class Delta:
    """Of a chunk, with L[i, j] = beta[i] e^(G[i] - G[j]) k[i] k[j] for j < i:

        U = (I + L)^-1 beta (V - e^G K S)

    takes the place of V. The scores' warpgroup makes the inverse (see `LowerInverse`). Where corrected values come out,
    what they are made of does, too, which division by a beta of 0 would not give:

        R = (I + M)^-1 (V - e^G K S),  U = beta R,  M[i, j] = e^(G[i] - G[j]) k[i] k[j] beta[j] for j < i

    Reversed, K is in the place of Q, Q in that of K and dO in that of V: O is what the gradient of U is without the
    chunk's other tokens. U's gradient, and what it takes off the state's, are (see `delta.gradients`)

        dU = (I + L)^-1' O,  S - (beta e^G / scale K)' dU

    With sums of dU times x dU itself stays inside, and O is dU times beta."""

    def __init__(self, spec: LinearSpec, tile: tk.st, barrier: int, room: bool = False):
        """room: are there registers for sums of the inverse's products (see `inverse.Sum`), and in `ahead`?"""
        self.inverse, self.room = LowerInverse(barrier, 3 if room else 1), room
        self.spec, self.there, self.tile = spec, spec.delta, tile
        self.forward, self.back = spec.delta and not spec.reverse, spec.delta and spec.reverse
        self.sums = self.back and spec.dot
        # o, and beside it one that beta tells apart from it
        self.gives_two = (self.back and not self.sums) or spec.updates

    def shared(self, al: tk.SharedAllocator) -> Any:
        """Room for it in shared memory; None without the rule."""
        if not self.there:
            return None
        lower = al.vector(CHUNK * PITCH)[None, 0]
        return DeltaShared(al.tile(self.tile, 2), lower, al.vector(CHUNK, 2), al.vector(CHUNK, 2))

    # ---- the scores' warpgroup -----------------------------------------------------------------

    def begin(self, g, t, chunk):
        """Registers: the rows' factors, beta of the first chunk (see `ahead`), the inverse."""
        if not self.there:
            return None
        return tk.rv(), ahead.begin(g.beta, g, t, chunk, self.spec.reverse, self.room), tk.rt(CHUNK, self.tile.dtype)

    def products(self, x: tk.RegTile, keys):
        """x = K K' is under way."""
        if self.there:
            tk.mm_ABt(x, keys, keys)

    @cute.jit
    def factors(self, g, shared, mine, at_start, stage):
        """To shared memory, by the first warp, behind the gates' sums. at_start: those, None without gates."""
        if const_expr(self.there):
            if tk.warp_id() % 4 == 0:
                for e in cutlass.range_constexpr(2):
                    i = 2 * tk.lane_id() + e
                    beta = Float32(mine[1].found[e])
                    shared.beta[i, stage] = beta
                    decay = Float32(1.0)
                    if const_expr(at_start is not None):
                        decay = cute.math.exp2(at_start[i, stage], fastmath=True)
                    if const_expr(self.back):
                        decay = decay * cute.arch.rcp_approx(g.scale)
                    shared.erase[i, stage] = beta * decay
                    if const_expr(self.spec.updates):
                        shared.erase[i, stage] = decay

    def ask(self, g, t, chunk, mine):
        """beta of the chunk that follows is on its way."""
        if self.there:
            ahead.follow(mine[1], g, t, chunk)

    @cute.jit
    def put(self, shared, x: tk.RegTile, mine, between, stage):
        """x = K K' has arrived: L to shared memory."""
        if const_expr(self.there):
            beta = mine[0]
            if const_expr(not self.spec.updates):
                tk.load_rows(beta, shared.beta[None, stage], 0, CHUNK)
                tk.mul_row(x, x, beta)
            if const_expr(between is not None):
                tk.decay_outer(x, x, *between)
            if const_expr(self.spec.updates):
                self.scale_columns(x, shared.beta[None, stage])
            tk.right_fill(x, 0, 0.0, diagonal=True)
            self.put_lower(shared.lower, x)

    @cute.jit
    def invert(self, shared, x: tk.RegTile, mine, stage):
        """The inverse to shared memory, by way of x."""
        if const_expr(self.there):
            self.inverse.sync()
            self.inverse.invert(shared.lower)
            self.get_lower(x, shared.lower)
            tk.copy(mine[2], x)
            tk.store(shared.inverse[stage], mine[2])

    @cute.jit
    def scale_columns(self, x: tk.RegTile, factors: cute.Tensor):
        """Each column as it is stored: registers of all factors at once would be too many."""
        for j in cutlass.range_constexpr(CHUNK // 4):
            f = factors[tk.first_col() + 8 * (j // 2) + j % 2]
            for r in cutlass.range_constexpr(2):
                x.rows_view[r, j] = x.rows_view[r, j] * f

    @cute.jit
    def put_lower(self, lower: cute.Tensor, x: tk.RegTile):
        self.each(x, lambda held, r, j, at: lower.__setitem__(at, held[r, j]))

    @cute.jit
    def get_lower(self, x: tk.RegTile, lower: cute.Tensor):
        self.each(x, lambda held, r, j, at: held.__setitem__((r, j), lower[at]))

    def each(self, x: tk.RegTile, f):
        """f of a lane's elements and where they are in shared memory."""
        for r in range(2):
            for j in range(CHUNK // 4):
                col = tk.first_col() + 8 * (j // 2) + j % 2
                f(x.rows_view, r, j, col * PITCH + tk.first_row() + 8 * r)

    # ---- the state's warpgroups ----------------------------------------------------------------

    def of_state(self, c, keys):
        """What the state gives for the keys is under way."""
        if self.forward:
            tk.mm_ABt(c.w, c.s16, keys)

    def updates(self, c, shared, stage, put):
        """c.w = U', c.v the same, rounded: what the state gave for the keys has arrived. Where corrected values come
        out, R' before, which `put` writes."""
        if self.forward:
            tk.load_shared_cols(c.erase, shared.erase[None, stage])
            if self.spec.head_dim > NARROW or self.spec.updates:  # fewer numbers are in registers at a time
                tk.mul_col(c.w, c.w, c.erase)
            if not self.spec.updates:
                tk.load_shared_cols(c.beta, shared.beta[None, stage])
            if self.spec.updates:
                tk.apply_narrow(c.v, lambda v, w: v - w, c.v, c.w)
            elif self.spec.head_dim > NARROW:
                tk.apply_narrow(c.v, lambda v, w, b: b * v - w, c.v, c.w, c.beta)
            else:
                tk.apply_narrow(c.v, lambda v, w, b, e: b * v - e * w, c.v, c.w, c.beta, c.erase)
            tk.mm_ABt(c.w, c.v, shared.inverse[stage])
            tk.mma_wait(0)
            if self.spec.updates:
                put()
                tk.load_shared_cols(c.beta, shared.beta[None, stage])
                tk.mul_col(c.w, c.w, c.beta)
            tk.copy(c.v, c.w)

    def gradients_of_updates(self, c, shared, stage):
        """Reversed, c.w = dU', from c.o, which is under way."""
        if self.back:
            tk.mma_wait(0)
            tk.copy(c.x, c.o)
            tk.mm_AB(c.w, c.x, shared.inverse[stage])
            tk.mma_wait(0)

    def erase(self, c, shared, keys, stage):
        """Reversed, what dU takes off the state is under way."""
        if self.back:
            tk.load_shared_cols(c.erase, shared.erase[None, stage])
            tk.apply_narrow(c.x, lambda du, e: -(e * du), c.w, c.erase)
            tk.mma_AB(c.s, c.x, keys)

    def times_beta(self, c, shared, stage):
        """Reversed, c.w = (dU beta)'."""
        tk.load_shared_cols(c.beta, shared.beta[None, stage])
        tk.mul_col(c.w, c.w, c.beta)

    def of_sums(self, c):
        """What sums are made of, and where its factor is read to: c.x is an operand of what is under way."""
        return (c.w, c.v) if self.back else (c.o, c.x)

    def result(self, c):
        """What goes to global memory: U, its gradient (and that times beta, or that alone), or outputs."""
        return c.w if self.spec.updates or self.back else c.o
