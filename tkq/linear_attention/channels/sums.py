"""Sums of what each token has, over it and those behind it: of chunks, by themselves."""
from dataclasses import dataclass
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.channels.spec import SumsSpec
from tkq.linear_attention.config import CHUNK
from tkq.runtime.compile import fake

THREADS, AHEAD = 128, 16  # of a block, of which each has two columns; tokens whose loads are under way


@dataclass(frozen=True)
class Operands:
    """terms: two or four of (B, S, C) fp32, C even. marks: None, or (S,), as `Segments.marks` has them, for B = 1.
    sums: (B, n, 64, C), n chunks of 64 tokens. totals: (B, n, C)."""

    terms: tuple
    marks: Optional[cute.Tensor]
    sums: cute.Tensor
    totals: cute.Tensor


class ChunkSums:
    """sums[b, n, i] = the sum over the tokens from 64 n + i to the chunk's end of terms[0] - terms[1] (+ terms[2] -
    terms[3]), 0 behind the last token; totals[b, n] = sums[b, n, 0]. A block has 256 columns of a chunk. With marks
    sums begin anew with the last token of a sequence; those of tokens of none are 0, whatever their terms are."""

    def __init__(self, spec: SumsSpec):
        self.spec = spec

    def fake_arguments(self):
        """Compiled for any B, S and C that is a multiple of 16."""
        B, S, N, C = fake.sym(), fake.sym(), fake.sym(), fake.sym(divisibility=16)
        terms = tuple(fake.tensor("fp32", (B, S, C)) for _ in range(self.spec.terms))
        marks = fake.tensor("int32", (S,), align=4) if self.spec.packed else None
        return *terms, *(None,) * (4 - self.spec.terms), marks, fake.tensor("fp32", (B, N, CHUNK, C)), fake.tensor(
            "fp32", (B, N, C))

    @cute.jit
    def __call__(self, a, b, c, d, marks: Optional[cute.Tensor], sums: cute.Tensor, totals: cute.Tensor,
                 stream: cuda.CUstream):
        columns = cute.ceil_div(sums.shape[3], 2 * THREADS)
        self.kernel(Operands((a, b, c, d)[:self.spec.terms], marks, sums, totals)).launch(
            grid=[sums.shape[1], columns, sums.shape[0]], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: Operands):
        chunk, columns, batch = cute.arch.block_idx()
        col = 2 * (columns * THREADS + tk.thread_in_warpgroup())
        if col < x.sums.shape[3]:
            total = cute.make_rmem_tensor((2,), Float32)
            total.fill(0.0)
            for part in cutlass.range(CHUNK // AHEAD, unroll=1):
                first = CHUNK - AHEAD * (part + 1)
                self.of_part(x, (batch, chunk, first, col), total)
            two = cute.make_layout(2)
            at = x.totals.iterator + cute.crd2idx((batch, chunk, col), x.totals.layout)
            cute.autovec_copy(total, cute.make_tensor(at.align(8), two))

    @cute.jit
    def of_part(self, x, where, total: cute.Tensor):
        """AHEAD tokens, from the last to the first."""
        batch, chunk, first, col = where
        two, held = cute.make_layout(2), cute.make_rmem_tensor((2, AHEAD, self.spec.terms), Float32)
        held.fill(0.0)
        marks = cute.make_rmem_tensor((AHEAD,), Int32)
        marks.fill(0)
        for i in cutlass.range_constexpr(AHEAD):
            token = chunk * CHUNK + first + i
            if token < x.terms[0].shape[1]:
                if const_expr(self.spec.packed):
                    marks[i] = x.marks[token]
                for n in cutlass.range_constexpr(self.spec.terms):
                    term = x.terms[n]
                    at = term.iterator + cute.crd2idx((batch, token, col), term.layout)
                    cute.autovec_copy(cute.make_tensor(at.align(8), two), held[None, i, n])
        for j in cutlass.range_constexpr(AHEAD):
            i = AHEAD - 1 - j
            for e in cutlass.range_constexpr(2):
                found = held[e, i, 0] - held[e, i, 1]
                if const_expr(self.spec.terms == 4):
                    found = found + (held[e, i, 2] - held[e, i, 3])
                if const_expr(self.spec.packed):
                    total[e] = Float32(0.0) if marks[i] != 0 else total[e]
                    found = Float32(0.0) if marks[i] == 2 else found
                total[e] = total[e] + found
            at = x.sums.iterator + cute.crd2idx((batch, chunk, first + i, col), x.sums.layout)
            cute.autovec_copy(total, cute.make_tensor(at.align(8), two))
