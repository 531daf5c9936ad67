"""Sums of what each token has, over it and those behind it: of columns, which are many."""
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, const_expr

from tkq.linear_attention.channels.spec import SumsSpec
from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.engine.packed import Piece, Sequences
from tkq.runtime.compile import fake

THREADS, LOADS = 128, 64  # of a block; of a thread: numbers that are on their way while as many are added up


class Given(NamedTuple):
    """x, less: (B, S, C) fp32. totals: (B, n, C), of the chunks of 64 tokens, of which those behind the first segment
    are read; None where they are y. end: (B, C), or None. y: (B, S, C), or totals. cu: None, or (N + 1,),
    where N packed sequences begin and end: then B is 1, end is (N, C), and the totals of a sequence that begins with
    token t are those from t // 64 on: what is written of two, but for each one's first, is in different places."""

    x: cute.Tensor
    less: cute.Tensor
    totals: Optional[cute.Tensor]
    end: Optional[cute.Tensor]
    y: cute.Tensor
    cu: Optional[cute.Tensor]

    @property
    def tokens(self):
        return self.x.shape[1]


class ColumnSums:
    """y[b, t, c] = end[b, c] + the sum of d[b, i, c] over i >= t, d = x - less. Of
    packed sequences sums end with a sequence; y of tokens of none is 0.

    A thread has a column of one of `segments` segments of a sequence, of whole chunks of 64 tokens, which it goes
    through from the last token to the first: threads next to each other read and write 128 bytes. What is behind a
    segment are the totals of its chunks, found by a launch before (`what` "totals"), where there is more than one: the
    order of all sums is that of one segment. In a chunk sums are of fp32, those of chunks of float64.

    As a thread's loads are of the tokens that follow, not more than one column of it is needed to have enough of them
    under way; two would leave processors without a block."""

    def __init__(self, spec: SumsSpec):
        self.spec, self.ahead, self.sequences = spec, LOADS // 2, Sequences(spec)
        self.parts, self.finds = CHUNK // self.ahead, spec.what == "totals"

    def fake_arguments(self):
        """Compiled for any B, S, C and N."""
        spec, (B, S, N, C) = self.spec, (fake.sym() for _ in range(4))

        def of(wanted, *shape):
            return fake.tensor("fp32", shape, align=4) if wanted else None

        cu = fake.tensor(spec.packed, (fake.sym(),), align=8 if spec.packed == "int64" else 4) if spec.packed else None
        end = of(spec.end, fake.sym() if spec.packed else B, C)
        return of(True, B, S, C), (of(True, B, S, C), of(not self.finds, B, N, C), end,
                                   of(True, B, N if self.finds else S, C), cu), Int32(1)

    @cute.jit
    def __call__(self, first: cute.Tensor, others: Any, segments: Int32, stream: cuda.CUstream):
        """first: x. others: the rest of `Given`."""
        x = Given(first, *others)
        self.kernel(x, segments).launch(
            grid=[segments - int(self.finds), cute.ceil_div(x.y.shape[2], THREADS),
                  self.sequences.blocks(x.x, x.cu)], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: Given, segments: Int32):
        segment, columns, batch = cute.arch.block_idx()
        of = Piece(Int32(0), x.tokens, x.tokens, batch)
        if const_expr(self.spec.packed is not None):
            of, batch = self.sequences.find(x, batch), Int32(0)
        self.thread((batch, segment, columns * THREADS + cute.arch.thread_idx()[0]), of, x, segments)

    @cute.jit
    def thread(self, place, of: Piece, x: Given, segments: Int32):
        """What one thread does: the tests run it on a CPU, one after the other."""
        batch, segment, col = place
        chunks, row0 = cute.ceil_div(of.end - of.first, CHUNK), of.first // CHUNK
        each = cute.ceil_div(chunks, segments)
        first = cutlass.min((segment + int(self.finds)) * each, chunks)
        last = cutlass.min(first + each, chunks)
        if col < x.y.shape[2]:
            behind, total = cute.make_rmem_tensor((1,), Float64), cute.make_rmem_tensor((1,), Float32)
            total[0] = Float32(0.0)
            self.begin(x, of, (batch, col), (row0 + last, row0 + chunks), behind)
            held, following = [cute.make_rmem_tensor((self.ahead, 2), Float32) for _ in range(2)]
            self.load(x, of, (batch, last * self.parts - 1, col), first, held)
            for i in cutlass.range((last - first) * self.parts, unroll=1):
                part = last * self.parts - 1 - i
                self.load(x, of, (batch, part - 1, col), first, following)
                self.add(x, of, (batch, part, col), held, total, Float32(behind[0]))
                if part % self.parts == 0:
                    if const_expr(self.finds):
                        x.y[batch, row0 + part // self.parts, col] = total[0]
                    behind[0] = behind[0] + Float64(total[0])
                    total[0] = Float32(0.0)
                held.store(following.load())

    @cute.jit
    def begin(self, x, of, place, rows, behind: cute.Tensor):
        """What is behind a segment: of tokens of no sequence nothing. rows: of totals."""
        batch, col = place
        behind[0] = Float64(0.0)
        if const_expr(self.spec.end):
            if of.state >= 0:
                behind[0] = Float64(x.end[of.state, col])
        if const_expr(not self.finds):
            if of.rows > 0:
                for i in cutlass.range(rows[1] - rows[0], unroll=8):
                    behind[0] = behind[0] + Float64(x.totals[batch, rows[1] - 1 - i, col])

    @cute.jit
    def load(self, x, of, place, first, held: cute.Tensor):
        """A part's numbers are on their way; 0 past the last token, anything before the segment."""
        part = place[1]
        if part >= first * self.parts:
            terms = [self.part_of(m, of, place) for m in (x.x, x.less)]
            for i in cutlass.range_constexpr(self.ahead):
                token = part * self.ahead + i
                for n in cutlass.range_constexpr(2):
                    held[i, n] = Float32(0.0)
                    if token < of.rows:
                        held[i, n] = terms[n][i]

    @cute.jit
    def add(self, x, of, place, held: cute.Tensor, total: cute.Tensor, behind):
        """A part's sums, from the last token to the first."""
        part, y = place[1], None if self.finds else self.part_of(x.y, of, place)
        for j in cutlass.range_constexpr(self.ahead):
            i = self.ahead - 1 - j
            total[0] = total[0] + (held[i, 0] - held[i, 1])
            if const_expr(not self.finds):
                if part * self.ahead + i < of.end - of.first:
                    y[i] = total[0] + behind

    def part_of(self, m, of, place):
        """A part's numbers of a column; from the first on addresses are counted in 32 bits."""
        batch, part, col = place
        at = m.iterator + cute.crd2idx((batch, of.first + part * self.ahead, col), m.layout)
        return cute.make_tensor(at, cute.make_layout(self.ahead, stride=Int32(m.stride[1])))
