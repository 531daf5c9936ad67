"""A whole sequence in and out of a thread block: rows of tiles are digits n1 of 64 tokens each."""
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

import tkq.tile as tk
from tkq.convolution.fft.sequences import Place
from tkq.convolution.fft.spec import COLS
from tkq.convolution.fft.tables import BIAS, EXPONENT, INFINITE, power, power_of, power_of_two
from tkq.convolution.fft.tokens import EACH, Asked, Tokens, load16, store16
from tkq.convolution.fft.whole.digits import DIGITS, POINTS, digit_of
from tkq.tile import vectors
from tkq.tile.assembly import ptx
from tkq.tile.maps import element

STRIDE = POINTS // DIGITS  # tokens from a digit n1 to the next
LINE = 64  # of those in 128 bytes
MINE = 2  # tiles of 64 x 64 tokens of each warpgroup


@dsl_user_op
def _prefetch(address: Int64, there: Boolean, *, loc=None, ip=None):
    """The line of 128 bytes, if there is one, into L2."""
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.global.L2 [$0]; }"
    ptx((Int64(address), Int32(there)), text, "l,r", loc, ip)


class WholeTokens:
    """Of a spec. A tile of what comes in has two chunks of 64 columns, one above the other, of what goes out one, in a
    thread's first rows."""

    def __init__(self, spec, dtype):
        self.spec, self.dtype = spec, dtype
        self.tokens = Tokens(spec, dtype)

    def asked(self, gate) -> list[Asked]:
        """Registers for a warpgroup's tiles."""
        return [self.tokens.asked(gate) for _ in range(MINE)]

    def first(self, n1, chunk, half):
        """A thread's first token of 8 neighbours, of half a row."""
        return n1 * STRIDE + COLS * chunk + COLS // 2 * half + tk.first_col() // 2 * EACH

    @cute.jit
    def ask(self, asked, u: cute.Tensor, gate: Optional[cute.Tensor], place: Place):
        """Load a warpgroup's tiles, 0 behind the ends; place: its sequence."""
        row = tk.first_row()
        token = self.first(row % DIGITS, 2 * MINE * tk.warpgroup_id() + row // DIGITS, 0)
        for to, x in ((0, u), (1, gate)):
            if const_expr(x is not None):
                first = self.address(x, place, token)
                for i in cutlass.range_constexpr(MINE):
                    for r in cutlass.range_constexpr(2):
                        for half in cutlass.range_constexpr(2):
                            more = 2 * COLS * i + 8 * STRIDE * r + COLS // 2 * half
                            self.put(asked[i][to], self.eight(x, place, (first, token, more)), r, half)

    @cute.jit
    def prefetch(self, x: cute.Tensor, place: Place):
        """A sequence into L2, 128 bytes by each of 512 threads."""
        token = cute.arch.thread_idx()[0] * LINE
        _prefetch(self.address(x, place, token), (place.batch < x.shape[0]) & (token < x.shape[2]))

    def address(self, x: cute.Tensor, place: Place, token):
        return vectors.run_at(x, (place.batch, place.head, token), EACH).iterator.toint()

    def put(self, to: tk.RegTile, found, r, half):
        words = cute.recast_tensor(to.tensor, Int32)
        for j in range(4):
            words[self.tokens.word(j, r, half)] = found[j]

    @cute.jit
    def eight(self, x: cute.Tensor, place: Place, at):
        """Four words of neighbours. at: (address, token, how many tokens further)"""
        (address, token, more), (B, _, L) = at, x.shape
        if const_expr(self.spec.vector > 1):
            return load16(address + 2 * more, (place.batch < B) & (token + more < L))
        held = cute.make_rmem_tensor((EACH,), self.dtype)
        held.fill(0.0)
        for e in cutlass.range_constexpr(EACH):
            if place.batch < B and token + more + e < L:
                held[e] = vectors.run_at(x, (place.batch, place.head, token + more + e), 1)[0]
        words = cute.recast_tensor(held, Int32)
        return [words[j] for j in range(4)]

    def note(self, asked, of_warps: cute.Tensor):
        """The largest magnitudes of a warpgroup's warps. of_warps (4, 1, warpgroups)"""
        most = cute.make_rmem_tensor((2, 1), Int32)
        self.tokens.note(most, asked, of_warps[None, None, tk.warpgroup_id()])

    def largest(self, of_warps: cute.Tensor):
        """That of the sequence, of a thread's rows, once all warps have noted theirs."""
        found = of_warps[0, 0, 0]
        for i in range(1, cute.size(of_warps)):
            found = cutlass.max(found, of_warps[i % 4, 0, i // 4])
        most = cute.make_rmem_tensor((2, 1), Int32)
        most[0, 0], most[1, 0] = found, found
        return most

    def scale(self, most, exponent):
        """(factor, exponent of another) that a sequence's results are multiplied by: what it was divided by times
        2^exponent, which may be more than an fp32 has where the results are not; NaN where it had some."""
        _, up = power(most[0, 0], self.spec.above)
        exponent = (up.bitcast(Int32) >> EXPONENT) - BIAS + exponent
        factor = cutlass.select_(most[0, 0] < INFINITE, power_of_two(exponent), Float32.inf - Float32.inf)
        return factor, cutlass.max(exponent - BIAS, 0)

    @cute.jit
    def store(self, y: cute.Tensor, gate: Optional[cute.Tensor], result: tk.RegTile, scale, place: Place, chunk):
        """y = a chunk of each digit n1, times scale, times the gate, rounded once. scale: as `scale` has it."""
        (factor, rest), numbers, L, more = scale, result.tensor, y.shape[2], None
        if rest > 0:
            for i in cutlass.range_constexpr(COLS // 2):
                numbers[i] = numbers[i] * power_of(rest)
        token = self.first(digit_of(tk.first_row())[0], chunk, 0)
        first = self.address(y, place, token)
        if const_expr(gate is not None):
            more = self.address(gate, place, token)
        for half in cutlass.range_constexpr(2):
            further = COLS // 2 * half
            values = [numbers[2 * self.tokens.word(j, 0, half) + e] * factor for j in range(4) for e in range(2)]
            if const_expr(gate is not None):
                by = tk.rt(COLS, self.dtype)
                self.put(by, self.eight(gate, place, (more, token, further)), 0, half)
                values = [x * element(by, 2 * self.tokens.word(i // 2, 0, half) + i % 2)
                          for i, x in enumerate(values)]
            eight = vectors.packed(values, self.dtype)
            if const_expr(self.spec.vector > 1):
                words = cute.recast_tensor(eight, Int32)
                store16(first + 2 * further, *[words[j] for j in range(4)], token + further < L)
            else:
                for e in cutlass.range_constexpr(EACH):
                    if token + further + e < L:
                        vectors.run_at(y, (place.batch, place.head, token + further + e), 1)[0] = eight[e]
