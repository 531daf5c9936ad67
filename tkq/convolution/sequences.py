"""Which sequence a token is of: the part of the kernels along channels that knows of cu_seqlens and seq_idx."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

import tkq.tile as tk

FAR = 1 << 20  # taps: farther than any from a sequence's first token


class Sequence(NamedTuple):
    """number: of the sequence, outside of 0 .. N - 1 where a token has none. begin, end: its tokens."""

    number: Any
    begin: Any
    end: Any


class Sequences:
    """Sequence n has the tokens from the largest of cu[0] .. cu[n] to the largest of cu[0] .. cu[n + 1], each within
    0 .. S: whatever cu holds, no token has two sequences, and none lies outside. Tokens before the first and behind the
    last have none.

    A warp looks for the sequence of its first token, and goes on from there. lanes: that look together."""

    def __init__(self, kind, lanes):
        self.kind, self.lanes = kind, lanes

    def load(self, cu, batch, tokens):
        """What `follow` needs of these tokens, in registers: nothing."""
        return []

    def cut(self, cu, i, tokens):
        """cu[i], within the tokens."""
        most = Int64(tokens) if self.kind == "int64" else tokens
        return Int32(cutlass.max(cutlass.min(cu[i], most), 0))

    def count(self, cu):
        """How many there are."""
        return Int32(cute.size(cu) - 1)

    @cute.jit
    def find(self, cu: cute.Tensor, batch, t, tokens):
        """Of token t; the lanes of a warp together. batch: 0."""
        cuts, lane = Int32(cute.size(cu)), tk.lane_id() if const_expr(self.lanes > 1) else Int32(0)
        above = cuts  # the first that is beyond t
        for base in cutlass.range(0, cuts, self.lanes, unroll=4):
            i = base + lane
            if i < cuts:
                if self.cut(cu, i, tokens) > t:
                    above = cutlass.min(above, i)
        if const_expr(self.lanes > 1):
            above = cute.arch.warp_redux_sync(above, "min")
        begin = Int32(0)
        for base in cutlass.range(0, above, self.lanes, unroll=4):
            if base + lane < above:
                begin = cutlass.max(begin, self.cut(cu, base + lane, tokens))
        if const_expr(self.lanes > 1):
            begin = cute.arch.warp_redux_sync(begin, "max")
        return self.made(cu, above, begin, tokens)

    @cute.jit
    def follow(self, cu: cute.Tensor, t, of, tokens, number=None):
        """Of token t, where `of` is that of the token before. number: of `Numbers` alone."""
        if t >= of.end:
            of = self.after(cu, t, of, tokens)
        return of

    @cute.jit
    def after(self, cu: cute.Tensor, t, of, tokens):
        """`of` token t, which comes behind those that the sequence `of` has; it is the first of its own."""
        above, cuts = of.number + 1, Int32(cute.size(cu))
        going = above < cuts
        while going:
            if self.cut(cu, above, tokens) > t:
                going = cutlass.Boolean(False)
            else:
                above = above + 1
                going = above < cuts
        return self.made(cu, above, t, tokens)

    @cute.jit
    def made(self, cu: cute.Tensor, above, begin, tokens):
        cuts, end = Int32(cute.size(cu)), tokens
        if above < cuts:
            end = self.cut(cu, above, tokens)
        if above == 0 or above >= cuts:
            begin = Int32(-FAR)
        return Sequence(above - 1, begin, end)

    def there(self, cu, of):
        """Does a token have a sequence?"""
        return (of.number >= 0) & (of.number < self.count(cu))


class Numbers:
    """Tokens have a number each, in cu's place, (B, S): neighbours of one number are a sequence. What a tap needs to
    know is how far back its sequence reaches, W - 1 tokens at most: so a warp looks at as many numbers before its first
    token, and goes on from there by those of its tokens, which are loaded with x."""

    def __init__(self, ahead):
        self.ahead = ahead

    def load(self, cu, batch, tokens):
        """The tokens' numbers, in registers."""
        held = cute.make_rmem_tensor((len(tokens),), cu.element_type)
        for j, t in enumerate(tokens):
            held[j] = cu[batch, cutlass.max(t, 0)]
        return [held]

    def find(self, cu, batch, t, tokens):
        """The sequence of the token before t, as far as it matters to t and those behind it."""
        begin, held = cutlass.max(t - self.ahead, 0), self.load(cu, batch, [t - self.ahead + i for i in range(
            self.ahead)])[0]
        for i in range(1, self.ahead):
            begin = cutlass.select_(held[i] != held[i - 1], t - self.ahead + i, begin)
        return Sequence(held[self.ahead - 1], begin, tokens)

    def follow(self, cu, t, of, tokens, number=None):
        """Of token t, where `of` is that of the token before. The first token of all has begun a sequence already."""
        return Sequence(number, cutlass.select_(number != of.number, t, of.begin), tokens)


def of_spec(spec, lanes):
    """What knows a spec's sequences."""
    return Numbers(spec.width - 1) if spec.numbers else Sequences(spec.packed, lanes)
