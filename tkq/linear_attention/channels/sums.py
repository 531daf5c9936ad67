"""Sums of what each token has, over it and those behind it: of columns, which are many."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, const_expr

from tkq.linear_attention.channels.spec import SumsSpec
from tkq.linear_attention.config import CHUNK
from tkq.runtime.compile import fake

THREADS, LOADS = 128, 64  # of a block; of a thread: numbers that are on their way while as many are added up


class Given(NamedTuple):
    """terms: two or four of (B, S, C) fp32. totals: (B, n, C), of the chunks of 64 tokens, of which those behind
    the first segment are read; None where they are y. end: (B, C), or None. y: (B, S, C), or totals."""

    terms: tuple
    totals: Optional[cute.Tensor]
    end: Optional[cute.Tensor]
    y: cute.Tensor


class ColumnSums:
    """y[b, t, c] = end[b, c] + the sum of d[b, i, c] over i >= t, d = terms[0] - terms[1] (+ terms[2] - terms[3]).

    A thread has a column of a segment of `each` chunks of 64 tokens, which it goes through from the last token to the
    first: threads next to each other read and write 128 bytes. What is behind a segment are the totals of its chunks,
    found by a launch before (`what` "totals"), where there is more than one: the order of all sums is that of one
    segment. In a chunk sums are of fp32, those of chunks of float64.

    As a thread's loads are of the tokens that follow, not more than one column of it is needed to have enough of them
    under way; two would leave processors without a block."""

    def __init__(self, spec: SumsSpec):
        self.spec, self.ahead = spec, LOADS // spec.terms
        self.parts = CHUNK // self.ahead

    def fake_arguments(self):
        """Compiled for any B, S and C."""
        spec, (B, S, N, C) = self.spec, (fake.sym() for _ in range(4))
        terms = tuple(fake.tensor("fp32", (B, S, C), align=4) for _ in range(spec.terms))
        totals = fake.tensor("fp32", (B, N, C), align=4) if spec.what == "sums" else None
        end = fake.tensor("fp32", (B, C), align=4) if spec.end else None
        y = fake.tensor("fp32", (B, N if spec.what == "totals" else S, C), align=4)
        return Given(terms, totals, end, y), Int32(1)

    @cute.jit
    def __call__(self, x: Given, each: Int32, stream: cuda.CUstream):
        """each: chunks of a segment."""
        columns, (blocks, _) = cute.ceil_div(x.y.shape[2], THREADS), self.segments(x.terms[0], each)
        self.kernel(x, each).launch(grid=[blocks, columns, x.y.shape[0]], block=[THREADS, 1, 1], stream=stream)

    def segments(self, term, each):
        """(how many blocks there are of a column's tokens, all chunks)."""
        chunks = cute.ceil_div(term.shape[1], CHUNK)
        return (chunks - each if self.spec.what == "totals" else cute.ceil_div(chunks, each)), chunks

    @cute.kernel
    def kernel(self, x: Given, each: Int32):
        segment, columns, batch = cute.arch.block_idx()
        self.thread((batch, segment, columns * THREADS + cute.arch.thread_idx()[0]), x, each)

    @cute.jit
    def thread(self, place, x: Given, each: Int32):
        """What one thread does: the tests run it on a CPU, one after the other."""
        batch, segment, col = place
        chunks = self.segments(x.terms[0], each)[1]
        first, last = segment * each, cutlass.min(segment * each + each, chunks)
        if const_expr(self.spec.what == "totals"):  # of a chunk, none of the first segment
            first, last = segment + each, segment + each + 1
        if col < x.y.shape[2]:
            behind, total = cute.make_rmem_tensor((1,), Float64), cute.make_rmem_tensor((1,), Float32)
            behind[0], total[0] = Float64(0.0), Float32(0.0)
            if const_expr(self.spec.end):
                behind[0] = Float64(x.end[batch, col])
            if const_expr(self.spec.what == "sums"):
                for i in cutlass.range(chunks - last, unroll=8):
                    behind[0] = behind[0] + Float64(x.totals[batch, chunks - 1 - i, col])
            held, following = [cute.make_rmem_tensor((self.ahead, self.spec.terms), Float32) for _ in range(2)]
            self.load(x, (batch, last * self.parts - 1, col), first, held)
            for i in cutlass.range((last - first) * self.parts, unroll=1):
                part = last * self.parts - 1 - i
                self.load(x, (batch, part - 1, col), first, following)
                self.add(x, (batch, part, col), held, total, Float32(behind[0]))
                if part % self.parts == 0:
                    if const_expr(self.spec.what == "totals"):
                        x.y[batch, first, col] = total[0]
                    behind[0] = behind[0] + Float64(total[0])
                    total[0] = Float32(0.0)
                held.store(following.load())

    @cute.jit
    def load(self, x, place, first, held: cute.Tensor):
        """A part's numbers are on their way; 0 past the last token, anything before the segment."""
        part = place[1]
        if part >= first * self.parts:
            terms = [self.part_of(m, place) for m in x.terms]
            for i in cutlass.range_constexpr(self.ahead):
                token = part * self.ahead + i
                for n in cutlass.range_constexpr(self.spec.terms):
                    held[i, n] = Float32(0.0)
                    if token < x.terms[0].shape[1]:
                        held[i, n] = terms[n][i]

    @cute.jit
    def add(self, x, place, held: cute.Tensor, total: cute.Tensor, behind):
        """A part's sums, from the last token to the first."""
        part, y = place[1], self.part_of(x.y, place) if self.spec.what == "sums" else None
        for j in cutlass.range_constexpr(self.ahead):
            i = self.ahead - 1 - j
            found = held[i, 0] - held[i, 1]
            if const_expr(self.spec.terms == 4):
                found = found + (held[i, 2] - held[i, 3])
            total[0] = total[0] + found
            if const_expr(self.spec.what == "sums"):
                if part * self.ahead + i < x.y.shape[1]:
                    y[i] = total[0] + behind

    def part_of(self, m, place):
        """A part's numbers of a column; from the first on addresses are counted in 32 bits."""
        batch, part, col = place
        at = m.iterator + cute.crd2idx((batch, part * self.ahead, col), m.layout)
        return cute.make_tensor(at, cute.make_layout(self.ahead, stride=Int32(m.stride[1])))
