"""Sequences in and out of registers, in the order in which products leave and take a tile: a thread has the same tokens
of both, and none changes hands.

Columns of a tile are tokens in an order of their own. Of each half of a row, 32 tokens, lane q of four has 8
neighbours, 8 q to 8 q + 7, in one access; as elements of a tile these are columns 8 j + 2 q + e, j to 3 and e to 1.
`tables.token_of` says which is where; factors from the right and between products have the same order.
"""
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import T, dsl_user_op

import tkq.tile as tk
from tkq.convolution.fft.sequences import Place
from tkq.convolution.fft.spec import COLS
from tkq.convolution.fft.tables import INFINITE, halved_row, magnitude, power
from tkq.tile import vectors
from tkq.tile.assembly import ptx, ptx_several
from tkq.tile.maps import element

EACH = 8  # neighbours
HALVES = range(2)  # of a row


@dsl_user_op
def load16(address: Int64, there: Boolean, *, loc=None, ip=None):
    """Four words, 0 where there are none."""
    text = ("{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
            "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }")
    found = ptx_several((Int64(address), Int32(there)), text, "=&r,=&r,=&r,=&r,l,r", loc, ip, [T.i32()] * 4)
    return [Int32(x) for x in found]


@dsl_user_op
def store16(address: Int64, a: Int32, b: Int32, c: Int32, d: Int32, there: Boolean, *, loc=None, ip=None):
    """Four words, where there is room."""
    ptx((Int64(address), Int32(a), Int32(b), Int32(c), Int32(d), Int32(there)),
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }", "l,r,r,r,r,r", loc, ip)


@dsl_user_op
def _of_two(a: Int32, b: Int32, kind: str, *, loc=None, ip=None) -> Int32:
    """Of two words of two numbers each the larger magnitudes, with some sign; NaN where one is."""
    return Int32(ptx((Int32(a), Int32(b)), f"max.NaN.xorsign.abs.{kind} $0, $1, $2;", "=r,r,r", loc, ip, T.i32(),
                     pure=True))


@dsl_user_op
def _scaled(x: Int32, by: Int32, *, loc=None, ip=None) -> Int32:
    """Two bf16 numbers times two."""
    return Int32(ptx((Int32(x), Int32(by)), "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", loc, ip, T.i32(), pure=True))


class Asked(NamedTuple):
    """What has been loaded of a tile: tiles of u and of the gate, in their type."""

    u: tk.RegTile
    gate: Optional[tk.RegTile]


class Tokens:
    """Of a spec with rows of whole transforms. A warpgroup calls each function together."""

    def __init__(self, spec, dtype):
        self.spec, self.dtype = spec, dtype

    # ---- places --------------------------------------------------------------------------------

    def where(self, place: Place, tile, r, half):
        """(batch index, token) of a thread's neighbours; r: which of its rows."""
        row = tk.first_row()
        if self.spec.halved_rows:
            transform, n1, _ = halved_row(row, self.spec.rows)
            token = (n1 + self.spec.rows // 2 * r) * COLS + 32 * half + tk.first_col() // 2 * EACH
            return place.batch + transform * self.spec.tiles + tile, place.token + token
        batch = place.batch + self.spec.sequence(tile, row)
        token = place.token + row % self.spec.rows * COLS + 32 * half + tk.first_col() // 2 * EACH
        if self.spec.rows >= 16:
            return batch, token + 8 * COLS * r
        return batch + 8 // self.spec.rows * self.spec.tiles * r, token

    def asked(self, gate) -> Asked:
        """Registers for a tile's numbers."""
        return Asked(tk.rt(COLS, self.dtype), None if gate is None else tk.rt(COLS, self.dtype))

    @cute.jit
    def ask(self, to: Asked, u: cute.Tensor, gate: Optional[cute.Tensor], place: Place, tile: cutlass.Constexpr):
        """Load a tile's numbers, 0 behind the ends."""
        self.fetch(to.u, u, place, tile)
        if const_expr(gate is not None):
            self.fetch(to.gate, gate, place, tile)

    @cute.jit
    def fetch(self, to: tk.RegTile, x: cute.Tensor, place: Place, tile: cutlass.Constexpr):
        words, (B, _, L) = cute.recast_tensor(to.tensor, Int32), x.shape
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                batch, token = self.where(place, tile, r, half)
                if const_expr(self.spec.vector > 1):
                    there = (batch < B) & (token < L)
                    run = vectors.run_at(x, (batch, place.head, token), EACH)
                    found = load16(run.iterator.toint(), there)
                    for j in cutlass.range_constexpr(4):
                        words[self.word(j, r, half)] = found[j]
                else:
                    held = cute.make_rmem_tensor((EACH,), self.dtype)
                    held.fill(0.0)
                    for e in cutlass.range_constexpr(EACH):
                        if batch < B and token + e < L:
                            held[e] = vectors.run_at(x, (batch, place.head, token + e), 1)[0]
                    found = cute.recast_tensor(held, Int32)
                    for j in cutlass.range_constexpr(4):
                        words[self.word(j, r, half)] = found[j]

    def word(self, j, r, half):
        """Which two elements of a tile are the j-th of 8 neighbours, two by two."""
        return 2 * (j + 4 * half) + r

    # ---- sizes ---------------------------------------------------------------------------------

    @cute.jit
    def note(self, most: cute.Tensor, asked, to: cute.Tensor):
        """most (2, tiles) = the largest magnitude that a warp has of the sequences of a thread's rows, as an fp32's
        bits; to (4, tiles) of those that have parts in several warps, which meet before `largest`."""
        warp = tk.thread_in_warpgroup() // 32
        for tile in cutlass.range_constexpr(self.spec.tiles):
            for r in cutlass.range_constexpr(2):
                most[r, tile] = self._of_row(asked[tile], r)
                for block in cutlass.range_constexpr(1, len(asked) // self.spec.tiles):
                    most[r, tile] = cutlass.max(most[r, tile], self._of_row(asked[block], r))
            if const_expr(self.spec.rows < 16):
                self._of_lanes(most, tile)
            else:
                both = cutlass.max(most[0, tile], most[1, tile])
                both = cute.arch.warp_redux_sync(both, "max")
                most[0, tile], most[1, tile] = both, both
                if const_expr(self.spec.rows > 16):
                    if tk.lane_id() == 0:
                        to[warp, tile] = both

    @cute.jit
    def _of_lanes(self, most: cute.Tensor, tile: cutlass.Constexpr):
        """most, of sequences that a few lanes have; of halved rows both of a thread's are one's."""
        lanes = 4 * min(8, self.spec.rows)
        if const_expr(self.spec.halved_rows):
            most[0, tile], lanes = cutlass.max(most[0, tile], most[1, tile]), 2 * self.spec.rows
        for r in cutlass.range_constexpr(1 if self.spec.halved_rows else 2):
            for shift in cutlass.range_constexpr(lanes.bit_length() - 1):
                other = cute.arch.shuffle_sync_bfly(most[r, tile], offset=1 << shift)
                most[r, tile] = cutlass.max(most[r, tile], other)
        if const_expr(self.spec.halved_rows):
            most[1, tile] = most[0, tile]

    @cute.jit
    def largest(self, most: cute.Tensor, of_warps: cute.Tensor):
        """most, of whole sequences: where they have parts in several warps, once these have met."""
        if const_expr(self.spec.rows > 16):
            for tile in cutlass.range_constexpr(self.spec.tiles):
                if const_expr(self.spec.rows == 64):
                    found = cutlass.max(cutlass.max(of_warps[0, tile], of_warps[1, tile]),
                                        cutlass.max(of_warps[2, tile], of_warps[3, tile]))
                else:
                    first = tk.thread_in_warpgroup() // 64 * 2
                    found = cutlass.max(of_warps[first, tile], of_warps[first + 1, tile])
                most[0, tile], most[1, tile] = found, found

    def _of_row(self, asked: Asked, r):
        """A thread's largest magnitude of one of its rows."""
        at = [self.word(j, r, half) for half in HALVES for j in range(4)]
        if asked.gate is not None:
            found = Int32(0)
            for i in at:
                for x in self._products(asked, i):
                    found = cutlass.max(found, magnitude(x))
            return found
        words, kind = cute.recast_tensor(asked.u.tensor, Int32), "bf16x2" if self.dtype is BFloat16 else "f16x2"
        found = words[at[0]]
        for i in at[1:]:
            found = _of_two(found, words[i], kind)
        if self.dtype is BFloat16:
            return cutlass.max(found << 16 & Int32(0x7FFFFFFF), found & Int32(0x7FFF0000))
        held = cute.make_rmem_tensor((2,), Float16)
        cute.recast_tensor(held, Int32)[0] = found
        return cutlass.max(magnitude(Float32(held[0])), magnitude(Float32(held[1])))

    def _products(self, asked: Asked, i):
        """The i-th two of u times the gate, fp32."""
        return [element(asked.u, 2 * i + e) * element(asked.gate, 2 * i + e) for e in range(2)]

    # ---- numbers -------------------------------------------------------------------------------

    @cute.jit
    def scaled(self, to: tk.RegTile, asked: Asked, by: cute.Tensor):
        """to, fp16 = a tile's numbers, times powers of 2. by (n, 2): of each of a thread's rows n, one after the other:
        their product may be none that an fp32 has."""
        out, u = cute.recast_tensor(to.tensor, Int32), cute.recast_tensor(asked.u.tensor, Int32)
        for i in cutlass.range_constexpr(COLS // 4):
            factors = [by[n, i % 2] for n in range(cute.size(by, mode=[0]))]
            if const_expr(asked.gate is None and self.dtype is BFloat16):
                word = u[i]
                for x in factors:
                    bits = x.bitcast(Int32)
                    word = _scaled(word, bits | bits >> 16)
                two = [(word << 16).bitcast(Float32), (word & Int32(-65536)).bitcast(Float32)]
            else:
                two = [element(asked.u, 2 * i + e) for e in range(2)]
                if const_expr(asked.gate is not None):
                    two = self._products(asked, i)
                for x in factors:
                    two = [y * x for y in two]
            out[i] = cute.recast_tensor(vectors.packed(two, Float16), Int32)[0]

    @cute.jit
    def divided(self, to: tk.RegTile, asked: Asked, most: cute.Tensor, tile: cutlass.Constexpr):
        """to, fp16 = a tile's numbers, divided by a power of 2 near the largest one of their sequence; one with NaN or
        infinities is zeros: its neighbours share transforms with it."""
        by, out = cute.make_rmem_tensor((1, 2), Float32), cute.recast_tensor(to.tensor, Int32)
        for r in cutlass.range_constexpr(2):
            by[0, r], _ = power(most[r, tile], self.spec.above)
        self.scaled(to, asked, by)
        for r in cutlass.range_constexpr(2):
            if most[r, tile] >= INFINITE:
                for i in cutlass.range_constexpr(COLS // 8):
                    out[2 * i + r] = Int32(0)

    @cute.jit
    def store(self, y: cute.Tensor, gate: Optional[cute.Tensor], result: tk.RegTile, most: cute.Tensor, scale,
              place: Place, tile: cutlass.Constexpr):
        """y = an output tile, times scale and its sequences' own, times the gate, rounded once."""
        B, _, L = y.shape
        by = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(2):
            _, up = power(most[r, tile], self.spec.above)
            by[r] = cutlass.select_(most[r, tile] < INFINITE, up, Float32.inf - Float32.inf) * scale
        more = None
        if const_expr(gate is not None):
            more = tk.rt(COLS, self.dtype)
            self.fetch(more, gate, place, tile)
        for r in cutlass.range_constexpr(2):
            for half in cutlass.range_constexpr(2):
                batch, token = self.where(place, tile, r, half)
                values = [result.tensor[2 * self.word(j, r, half) + e] * by[r] for j in range(4) for e in range(2)]
                if const_expr(gate is not None):
                    values = [x * element(more, 2 * self.word(i // 2, r, half) + i % 2)
                              for i, x in enumerate(values)]
                eight = vectors.packed(values, self.dtype)
                if const_expr(self.spec.vector > 1):
                    there = vectors.run_at(y, (batch, place.head, token), EACH).iterator.toint()
                    words = cute.recast_tensor(eight, Int32)
                    store16(there, *[words[j] for j in range(4)], (batch < B) & (token < L))
                else:
                    for e in cutlass.range_constexpr(EACH):
                        if batch < B and token + e < L:
                            vectors.run_at(y, (batch, place.head, token + e), 1)[0] = eight[e]
