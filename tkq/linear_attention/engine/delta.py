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
from tkq.linear_attention.spec import LEAST, NARROW
from tkq.tile.maps import element


class DeltaShared(NamedTuple):
    """inverse: (I + L)^-1, 16 bits, two stages; where it is given, those of the tokens. lower: L, fp32, of the scores'
    warpgroup alone, column by column; None where the inverse is given. beta, erase: of a chunk's tokens, beta and
    beta * 2^G, in the reversed order over the scale, two stages. keys: -N, 16 bits, two stages (see `Delta`); None
    where it is not needed."""

    inverse: tk.SharedTile
    lower: Any
    beta: cute.Tensor
    erase: cute.Tensor
    keys: Any = None


class Delta:
    """Of a chunk, with L[i, j] = beta[i] e^(G[i] - G[j]) k[i] k[j] for j < i:

        U = (I + L)^-1 beta (V - e^G K S)

    takes the place of V. The scores' warpgroup makes the inverse (see `LowerInverse`). Where what gradients need comes
    out, or corrected values do, it is that of another matrix: division of U by a beta of 0 would not give R.

        R = (I + M)^-1 (V - e^G K S),  U = beta R,  M = N beta,  N[i, j] = e^(G[i] - G[j]) k[i] k[j] for j < i

    Reversed, K is in the place of Q, Q in that of K and dO in that of V: O is what the gradient of U is without the
    chunk's other tokens. Gradients of V and U, and what they take off the state's, are (see
    `linear_attention.delta.gradients`)

        dV = (I + M)^-1' beta O,  dU = O - N' dV,  S - (e^G / scale K)' dV

    as (I + M)^-1 beta = beta (I + L)^-1. The forward's inverse is given, x is what it has kept, and what comes out is
    dV and the sums of dU times R. Without it (gates of columns), dU = (I + L)^-1' O comes out, and dV = beta dU.

    Kept is U, rounded once, where beta's size is `LEAST` or more, and R, of beta's sign, where it is less: `of_kept`
    makes U of both. U over beta is R there, and dV over beta is dU, with fewer roundings than O - N' dV has where keys
    are alike."""

    def __init__(self, spec: Any, tile: tk.st, barrier: int, room: bool = False, inverse: str | None = None):
        """room: are there registers for sums of the inverse's products (see `inverse.Sum`), and in `ahead`? inverse: as
        `LinearSpec` has it."""
        self.inverse, self.room = LowerInverse(barrier, 3 if room else 1), room
        self.spec, self.there, self.tile = spec, bool(spec.delta), tile
        self.forward, self.back = self.there and not spec.reverse, self.there and spec.reverse
        self.kept, self.known = inverse == "out", inverse == "in"
        self.of_columns = bool(spec.updates or inverse)  # M in the place of L
        self.sums = self.back and self.known and spec.dot
        self.of_keys = self.there and (self.sums or not self.known)  # is something made of K K'?
        self.solves = self.there and not self.known
        self.gives_two = self.back or spec.updates  # of columns: o, and beside it another
        self.outputs = not spec.updates or bool(inverse)  # are there any, with the forward?

    def shared(self, al: tk.SharedAllocator, stages: int = 2) -> Any:
        """Room for it in shared memory; None without the rule. stages: of tokens."""
        if not self.there:
            return None
        lower = None if self.known else al.vector(CHUNK * PITCH)[None, 0]
        return DeltaShared(al.tile(self.tile, stages if self.known else 2), lower, al.vector(CHUNK, 2),
                           al.vector(CHUNK, 2), al.tile(self.tile, 2) if self.sums else None)

    def of_inverse(self, tokens, scores):
        """Which stage of the inverse goes with those."""
        return tokens if self.known else scores

    def tokens_of(self, g, shared, t, place):
        """What the producer loads of a chunk: an inverse that is given. place: (stage, chunk)."""
        return [(shared.inverse[place[0]], g.inverse, (t.batch, t.head, place[1], 0))] if self.known else []

    # ---- the scores' warpgroup -----------------------------------------------------------------

    def begin(self, g, t, chunk):
        """Registers: the rows' factors, beta of the first chunk (see `ahead`), the inverse."""
        if not self.there:
            return None
        step = -1 if self.spec.reverse else 1
        return tk.rv(), ahead.begin(g.beta, g, t, chunk, step, self.room), tk.rt(CHUNK, self.tile.dtype)

    def products(self, x: tk.RegTile, keys):
        """x = K K' is under way, where something is made of it."""
        if self.of_keys:
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
                    if const_expr(self.of_columns):
                        shared.erase[i, stage] = decay

    def ask(self, g, t, chunk, mine):
        """beta of the chunk that follows is on its way."""
        if self.there:
            ahead.follow(mine[1], g, t, chunk)

    @cute.jit
    def put(self, shared, x: tk.RegTile, mine, between, stage):
        """x = K K' has arrived: L or M, or -N, to shared memory."""
        if const_expr(self.of_keys):
            beta = mine[0]
            if const_expr(not self.of_columns):
                tk.load_rows(beta, shared.beta[None, stage], 0, CHUNK)
                tk.mul_row(x, x, beta)
            if const_expr(between is not None):
                tk.decay_outer(x, x, *between)
            if const_expr(self.of_columns and not self.known):
                self.scale_columns(x, shared.beta[None, stage])
            tk.right_fill(x, 0, 0.0, diagonal=True)
            if const_expr(self.known):
                tk.apply_narrow(mine[2], lambda n: -n, x)
                tk.store(shared.keys[stage], mine[2])
            else:
                self.put_lower(shared.lower, x)

    @cute.jit
    def invert(self, shared, x: tk.RegTile, mine, stage, apart=None):
        """The inverse to shared memory, by way of x. apart: as `LowerInverse` has it."""
        if const_expr(self.solves):
            self.inverse.sync()
            self.inverse.invert(shared.lower, apart)
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

    @cute.jit
    def keep(self, g, shared, t, place):
        """An inverse that has been made leaves, by a warp of the first block of V. place: (the chunk, the stage, the
        state's warpgroup)."""
        if const_expr(self.kept):
            chunk, stage, wg = place
            if t.part + wg == 0 and tk.warp_id() % 4 == 0:
                tk.store_async(g.kept, shared.inverse[stage], (t.batch, t.head, chunk, 0))

    @cute.jit
    def kept_by(self, wg):
        """It has left shared memory; where there are outputs, `put` has waited for it."""
        if const_expr(self.kept and not self.spec.writes):
            if wg == 0 and tk.warp_id() % 4 == 0:
                tk.store_wait()

    def updates(self, c, shared, stages, put):
        """c.w = U', c.v the same, rounded: what the state gave for the keys has arrived. With updates, what is kept
        before, which `put` writes. stages: of the factors and of the inverse."""
        stage, of_inverse = stages
        if self.forward:
            tk.load_shared_cols(c.erase, shared.erase[None, stage])
            if self.spec.head_dim > NARROW or self.of_columns:  # fewer numbers are in registers at a time
                tk.mul_col(c.w, c.w, c.erase)
            if not self.of_columns:
                tk.load_shared_cols(c.beta, shared.beta[None, stage])
            if self.of_columns:
                tk.apply_narrow(c.v, lambda v, w: v - w, c.v, c.w)
            elif self.spec.head_dim > NARROW:
                tk.apply_narrow(c.v, lambda v, w, b: b * v - w, c.v, c.w, c.beta)
            else:
                tk.apply_narrow(c.v, lambda v, w, b, e: b * v - e * w, c.v, c.w, c.beta, c.erase)
            tk.mm_ABt(c.w, c.v, shared.inverse[of_inverse])
            tk.mma_wait(0)
            if self.of_columns:
                tk.load_shared_cols(c.beta, shared.beta[None, stage])
                if self.spec.updates:
                    for i in range(cute.size(c.beta.tensor)):
                        b = c.beta.tensor[i]
                        c.erase.tensor[i], c.beta.tensor[i] = kept_of(b), of_kept(b)
                    tk.mul_col(c.w, c.w, c.erase)
                    put()
                tk.mul_col(c.w, c.w, c.beta)
            tk.copy(c.v, c.w)

    def gradients_of_updates(self, c, shared, stages):
        """Reversed, c.w = dV', c.rest the same, rounded, from c.o, which is under way; c.o becomes dU' then. Without an
        inverse that is given, c.w = dU'. stages: of the factors and of the inverse."""
        stage, of_inverse = stages
        if self.back:
            tk.mma_wait(0)
            if self.known:
                tk.load_shared_cols(c.beta, shared.beta[None, stage])
                tk.apply_narrow(c.x, lambda o, b: o * b, c.o, c.beta)
            else:
                tk.copy(c.x, c.o)
            tk.mm_AB(c.w, c.x, shared.inverse[of_inverse])
            tk.mma_wait(0)
            if self.known:
                tk.copy(c.rest, c.w)
            if self.sums:
                tk.mma_AB(c.o, c.rest, shared.keys[stage])

    def erase(self, c, shared, keys, stage):
        """Reversed, what that takes off the state is under way."""
        if self.back:
            tk.load_shared_cols(c.erase, shared.erase[None, stage])
            tk.apply_narrow(c.x, lambda du, e: -(e * du), c.w, c.erase)
            tk.mma_AB(c.s, c.x, keys)

    def times_beta(self, c, shared, stage):
        """Reversed, c.w = (dU beta)'."""
        tk.load_shared_cols(c.beta, shared.beta[None, stage])
        tk.mul_col(c.w, c.w, c.beta)

    def gradients_of_lacking(self, c, shared, stage):
        """Reversed, c.w, which times what was kept is that times R: dU', or dV' over beta^2."""
        if self.sums:
            tk.load_shared_cols(c.beta, shared.beta[None, stage])
            for i in range(cute.size(c.beta.tensor)):
                b = c.beta.tensor[i]
                c.erase.tensor[i] = cutlass.select_(is_large(b), cute.arch.rcp_approx(b * b), Float32(0.0))
                c.beta.tensor[i] = sign_of(b)
            for i in range(cute.size(c.o.tensor)):
                f = element(c.erase, i)
                c.w.tensor[i] = cutlass.select_(f > 0.0, element(c.rest, i) * f, c.o.tensor[i] * element(c.beta, i))

    def of_sums(self, c):
        """What sums are made of, and where its factor is read to: c.x is an operand of what is under way."""
        return (c.w, c.v) if self.back else (c.o, c.x)

    def result(self, c):
        """What goes to global memory: U, a gradient, or outputs."""
        if self.back and self.known:
            return c.rest
        return c.w if self.back or not self.outputs else c.o


def is_large(b):
    """Is U kept where this is beta?"""
    return cute.math.absf(b) >= LEAST


def sign_of(b):
    """1 or -1."""
    return cutlass.select_(b < 0.0, Float32(-1.0), Float32(1.0))


def kept_of(b):
    """What R is kept times, of beta."""
    return cutlass.select_(is_large(b), b, sign_of(b))


def of_kept(b):
    """What is U, times what is kept; of beta."""
    return cutlass.select_(is_large(b), Float32(1.0), cute.math.absf(b))
