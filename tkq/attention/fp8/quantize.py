"""q, k and v of attention in e4m3, with a scale for each sequence and K/V head."""
from typing import NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float8E4M3FN, Float32, Int32, const_expr

import tkq.tile as tk
from tkq.attention.fp8.spec import MEAN_ROWS
from tkq.attention.fp8.spec import QUANTIZED_TOGETHER as VECTOR
from tkq.runtime.compile import fake
from tkq.tile import vectors
from tkq.tile.float8 import scale_of

THREADS, ROWS = 256, 32  # ROWS: tokens of a block


class Operands(NamedTuple):
    """Beside q (B, Sq, H, D): k, v (B, Sk, Hk, D). Results: q8, k8, v8 in e4m3; descale (3, B, Hk) fp32. largest (3, B,
    Hk) int32, zeros: the bits of the largest magnitudes so far. sums (parts, B, Hk, D), mean (B, Hk, D) fp32: of k, a
    sum for each MEAN_ROWS tokens. cos, sin (rows, D / 2) fp32."""

    k: cute.Tensor
    v: cute.Tensor
    q8: cute.Tensor
    k8: cute.Tensor
    v8: cute.Tensor
    descale: cute.Tensor
    largest: cute.Tensor
    sums: Optional[cute.Tensor] = None
    mean: Optional[cute.Tensor] = None
    cos: Optional[cute.Tensor] = None
    sin: Optional[cute.Tensor] = None


class QuantizeQkv:
    """Two launches: the largest magnitude of each tensor, sequence and K/V head is found, by integer maxima of its
    bits, which any order of blocks leaves the same; then the tensors are divided by their scales, and rounded.

    A block has ROWS tokens of one K/V head, or of all query heads that belong to it.

    smooth_k: two launches more, before these: k's sums of MEAN_ROWS tokens each, and their mean. rope, the mean and the
    rotation are computed anew in each launch: a row's vectors lie in neighbouring lanes, which exchange them."""

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
        sums = mean = cos = sin = None
        if self.spec.smooth_k:
            sums = fake.tensor("fp32", (fake.sym(), B, Hk, D), align=16)
            mean = fake.tensor("fp32", (B, Hk, D), align=16)
        if self.spec.rope:
            rows, half = fake.sym(), fake.sym(divisibility=VECTOR)
            cos, sin = (fake.tensor("fp32", (rows, half), align=16) for _ in range(2))
        return given[0], Operands(*given[1:], *made, fake.tensor("fp32", (3, B, Hk), align=4),
                                  fake.tensor("int32", (3, B, Hk), align=4), sums, mean, cos, sin)

    @cute.jit
    def __call__(self, q: cute.Tensor, x: Operands, stream: cuda.CUstream):
        B, Sk, Hk, _ = x.k.shape
        grid = [cute.ceil_div(cutlass.max(q.shape[1], Sk), ROWS) * B * Hk, 1, 3]
        if const_expr(self.spec.smooth_k):
            columns = cute.size(x.mean) // VECTOR
            blocks = cutlass.max(cute.ceil_div(columns * x.sums.shape[0], THREADS), 1)  # of no keys, too
            self.add(x).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)
            self.average(x).launch(grid=[cute.ceil_div(columns, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)
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

    def element(self, which, src, x, at):
        """The vector at a place, as fp32 values: with its position, where q or k gets one."""
        values = vectors.wide(vectors.load(vectors.run_at(src, at, VECTOR)))
        if which == 2 or not self.spec.rope:
            return values
        batch, token, head, col = at
        half = src.shape[3] // 2
        first = col < half
        partner = cutlass.select_(first, col + half, col - half)
        angle = token, cutlass.select_(first, col, partner)
        cos, sin = (vectors.wide(vectors.load(vectors.run_at(table, angle, VECTOR))) for table in (x.cos, x.sin))
        others = vectors.wide(vectors.load(vectors.run_at(src, (batch, token, head, partner), VECTOR)))
        sign = cutlass.select_(first, Float32(-1.0), Float32(1.0))
        return [a * c + sign * (b * s) for a, b, c, s in zip(values, others, cos, sin, strict=True)]

    def values(self, which, src, x, at, place):
        """The vector at a place, as it is quantised. All lanes of a warp together."""
        values = self.element(which, src, x, at)
        if which == 1 and self.spec.smooth_k:
            mean = vectors.wide(vectors.load(vectors.run_at(x.mean, (place[0], place[1], at[3]), VECTOR)))
            values = [value - of for value, of in zip(values, mean, strict=True)]
        return rotated(values, self.spec.rotate) if which < 2 and self.spec.rotate else values

    @cute.kernel
    def add(self, x: Operands):
        """k's sums: a thread has VECTOR columns of a head, of MEAN_ROWS tokens."""
        B, S, heads, D = x.k.shape
        unit, each = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0], D // VECTOR
        col, rest = unit % each * VECTOR, unit // each
        head, rest = rest % heads, rest // heads
        batch, part = rest % B, rest // B
        if part < x.sums.shape[0]:
            sums = cute.make_rmem_tensor(VECTOR, Float32)
            sums.fill(0.0)
            for token in cutlass.range(part * MEAN_ROWS, cutlass.min((part + 1) * MEAN_ROWS, S), unroll=4):
                values = self.element(1, x.k, x, (batch, token, head, col))
                for i in cutlass.range_constexpr(VECTOR):
                    sums[i] = sums[i] + values[i]
            vectors.store(sums, vectors.run_at(x.sums, (part, batch, head, col), VECTOR))

    @cute.kernel
    def average(self, x: Operands):
        """The mean of k: a thread has VECTOR columns of a head."""
        B, heads, D = x.mean.shape
        unit, each = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0], D // VECTOR
        col, rest = unit % each * VECTOR, unit // each
        head, batch = rest % heads, rest // heads
        if batch < B:
            sums = cute.make_rmem_tensor(VECTOR, Float32)
            sums.fill(0.0)
            for part in cutlass.range(x.sums.shape[0], unroll=4):
                values = vectors.wide(vectors.load(vectors.run_at(x.sums, (part, batch, head, col), VECTOR)))
                for i in cutlass.range_constexpr(VECTOR):
                    sums[i] = sums[i] + values[i]
            found = [sums[i] / Float32(x.k.shape[1]) for i in range(VECTOR)]
            vectors.store(vectors.packed(found, Float32), vectors.run_at(x.mean, (batch, head, col), VECTOR))

    @cute.jit
    def find_in(self, which: Constexpr[int], src: cute.Tensor, x: Operands):
        place = self.place(src, x)
        most, thread = Int32(0), cute.arch.thread_idx()[0]
        for j in cutlass.range(cute.ceil_div(place[3], THREADS), unroll=4):
            i = j * THREADS + thread
            there = i < place[3]
            at = self.at(src, place, cutlass.min(i, place[3] - 1))
            for value in self.values(which, src, x, at, place):
                bits = value.bitcast(Int32) & Int32(0x7FFFFFFF)  # NaN is larger than all
                most = cutlass.max(most, bits if there else Int32(0))
        most = cute.arch.warp_redux_sync(most, "max")
        if tk.lane_id() == 0 and most > 0:
            at = x.largest.iterator + cute.crd2idx((which, place[0], place[1]), x.largest.layout)
            cute.arch.red(at, most, op="max", dtype="s32", sem="relaxed", scope="gpu")

    @cute.jit
    def divide_in(self, which: Constexpr[int], src: cute.Tensor, dst: cute.Tensor, x: Operands):
        place = self.place(src, x)
        scale = scale_of(Int32(x.largest[which, place[0], place[1]]).bitcast(Float32), "e4m3")
        inverse, thread = Float32(1.0) / scale, cute.arch.thread_idx()[0]
        if place[2] == 0 and thread == 0:
            x.descale[which, place[0], place[1]] = scale
        for j in cutlass.range(cute.ceil_div(place[3], THREADS), unroll=4):
            i = j * THREADS + thread
            at = self.at(src, place, cutlass.min(i, place[3] - 1))
            values = self.values(which, src, x, at, place)
            if i < place[3]:
                vectors.store(vectors.packed([value * inverse for value in values], Float8E4M3FN),
                              vectors.run_at(dst, at, VECTOR))


def rotated(values, width):
    """A row of ``width`` times the orthonormal Hadamard matrix: this lane's VECTOR columns of it. Butterflies among a
    lane's columns, then among lanes. A group of width / VECTOR lanes has a row; all lanes of a warp together."""
    step = 1
    while step < VECTOR:
        values = [values[i ^ step] - values[i] if i & step else values[i] + values[i ^ step] for i in range(VECTOR)]
        step *= 2
    while step < width:
        offset = step // VECTOR
        sign = cutlass.select_((tk.lane_id() & offset) == 0, Float32(1.0), Float32(-1.0))
        values = [cute.arch.shuffle_sync_bfly(v, offset=offset) + sign * v for v in values]
        step *= 2
    return [v * width ** -0.5 for v in values]
