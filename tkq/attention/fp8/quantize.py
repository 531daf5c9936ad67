"""q, k and v of attention in e4m3, with a scale for each sequence and K/V head."""
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float8E4M3FN, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.fp8.spec import QUANTIZED_TOGETHER as VECTOR
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.float8 import scale_of

THREADS, ROWS = 256, 32  # ROWS: tokens of a block


class Operands(NamedTuple):
    """Beside q (B, Sq, H, D): k, v (B, Sk, Hk, D). Results: q8, k8, v8 in e4m3; descale (3, B, Hk) fp32. largest (3, B,
    Hk) int32, zeros: the bits of the largest magnitudes so far."""

    k: cute.Tensor
    v: cute.Tensor
    q8: cute.Tensor
    k8: cute.Tensor
    v8: cute.Tensor
    descale: cute.Tensor
    largest: cute.Tensor


class QuantizeQkv:
    """Two launches: the largest magnitude of each tensor, sequence and K/V head is found, by integer maxima of its
    bits, which any order of blocks leaves the same; then the tensors are divided by their scales, and rounded.

    A block has ROWS tokens of one K/V head, or of all query heads that belong to it."""

    def __init__(self, spec):
        self.spec = spec

    def fake_arguments(self) -> tuple:
        """Any sizes; strides of whole vectors."""
        B, Sq, Sk, H, Hk, D = (*(fake.sym() for _ in range(5)), fake.sym(divisibility=VECTOR))

        def like(dtype, rows, heads):
            strides = *(fake.sym64(divisibility=VECTOR) for _ in range(3)), 1
            return fake.tensor(dtype, (B, rows, heads, D), strides, align=16 if dtype == self.spec.dtype else 8)

        given = [like(self.spec.dtype, rows, heads) for rows, heads in ((Sq, H), (Sk, Hk), (Sk, Hk))]
        made = [like("e4m3", rows, heads) for rows, heads in ((Sq, H), (Sk, Hk), (Sk, Hk))]
        return given[0], Operands(*given[1:], *made, fake.tensor("fp32", (3, B, Hk), align=4),
                                  fake.tensor("int32", (3, B, Hk), align=4))

    @cute.jit
    def __call__(self, q: cute.Tensor, x: Operands, stream: cuda.CUstream):
        B, Sk, Hk, _ = x.k.shape
        grid = [cute.ceil_div(cutlass.max(q.shape[1], Sk), ROWS) * B * Hk, 1, 3]
        self.find(q, x).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)
        self.divide(q, x).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def find(self, q: cute.Tensor, x: Operands):
        self.each(q, x, True)

    @cute.kernel
    def divide(self, q: cute.Tensor, x: Operands):
        self.each(q, x, False)

    @cute.jit
    def each(self, q: cute.Tensor, x: Operands, finds: Constexpr[bool]):
        """Of the block's tensor."""
        which = cute.arch.block_idx()[2]
        tensors = (q, x.q8), (x.k, x.k8), (x.v, x.v8)
        for i in cutlass.range_constexpr(3):
            if which == i:
                if const_expr(finds):
                    self.find_in(i, tensors[i][0], x)
                else:
                    self.divide_in(i, *tensors[i], x)

    def place(self, src: cute.Tensor, x: Operands):
        """(sequence, K/V head, first token, vectors of the block's part of src, vectors of a token)"""
        _, S, H, D = src.shape
        heads_kv = x.k.shape[2]
        parts = x.k.shape[0] * heads_kv
        part, first = cute.arch.block_idx()[0] % parts, cute.arch.block_idx()[0] // parts * ROWS
        each = H // heads_kv * (D // VECTOR)
        return part // heads_kv, part % heads_kv, first, cutlass.max(cutlass.min(S - first, ROWS), 0) * each, each

    def at(self, src: cute.Tensor, place, i):
        """The coordinates of the part's i-th vector."""
        batch, head, first, _, each = place
        of_head = src.shape[3] // VECTOR
        col, heads = i % each, each // of_head
        return batch, first + i // each, head * heads + col // of_head, col % of_head * VECTOR

    @cute.jit
    def find_in(self, which: Constexpr[int], src: cute.Tensor, x: Operands):
        place = self.place(src, x)
        most = Int32(0)
        for i in cutlass.range(cute.arch.thread_idx()[0], place[3], THREADS, unroll=4):
            for value in vectors.wide(vectors.load(vectors.run_at(src, self.at(src, place, i), VECTOR))):
                most = cutlass.max(most, value.bitcast(Int32) & Int32(0x7FFFFFFF))  # NaN is larger than all
        most = cute.arch.warp_redux_sync(most, "max")
        if tk.lane_id() == 0 and most > 0:
            at = x.largest.iterator + cute.crd2idx((which, place[0], place[1]), x.largest.layout)
            cute.arch.red(at, most, op="max", dtype="s32", sem="relaxed", scope="gpu")

    @cute.jit
    def divide_in(self, which: Constexpr[int], src: cute.Tensor, dst: cute.Tensor, x: Operands):
        place = self.place(src, x)
        scale = scale_of(Int32(x.largest[which, place[0], place[1]]).bitcast(Float32), "e4m3")
        inverse = Float32(1.0) / scale
        if place[2] == 0 and cute.arch.thread_idx()[0] == 0:
            x.descale[which, place[0], place[1]] = scale
        for i in cutlass.range(cute.arch.thread_idx()[0], place[3], THREADS, unroll=4):
            at = self.at(src, place, i)
            values = vectors.wide(vectors.load(vectors.run_at(src, at, VECTOR)))
            vectors.store(vectors.packed([value * inverse for value in values], Float8E4M3FN),
                          vectors.run_at(dst, at, VECTOR))
