"""Sums from each token to the last: of what gates' gradients are made of, in float64, in an order that sizes alone
decide."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.engine.packed import Piece, Sequences
from tkq.linear_attention.spec import SuffixSpec
from tkq.linear_attention.suffix.plan import EACH, HEADS, LANES, SEGMENTS, TILE
from tkq.linear_attention.suffix.steps import StepOperands, StepSizes
from tkq.runtime.compile import fake

THREADS = HEADS * LANES


class Given(NamedTuple):
    """As `SuffixSums` has them. totals: (B, N, H) fp64, room for those of N segments of each sequence. cu: None, or
    (N + 1,), where N packed sequences begin and end. steps: in the place of y, or None."""

    x: cute.Tensor
    less: Optional[cute.Tensor]
    end: Optional[cute.Tensor]
    totals: cute.Tensor
    y: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    steps: Optional[StepOperands]

    @property
    def tokens(self):
        return self.x.shape[2]


@dataclass(frozen=True)
class Task:
    """Tokens tile0 * TILE to tile1 * TILE of one head of one sequence, and this thread's place in a tile. of: where
    the sequence's tokens are. row, segment: which totals are its own."""

    batch: Int32
    of: Piece
    head: Int32
    lane: Int32
    here: cutlass.Boolean
    tile0: Int32
    tile1: Int32
    row: Int32
    segment: Int32


class SuffixSums:
    """y[b, t, h] = end[b, h] + the sum of x[b, i, h] - less[b, i, h] over i >= t. With steps less is multiplied by
    Mamba-2's step sizes, and their gradients come out in the place of y (see `StepSizes`).

    x, less: (P, B, S, H) fp32, of any strides, the sums over P of what is meant. end: (B, H). y: (B, S, H). Of packed
    sequences B is 1, end is (N, H), and sums end with a sequence; y of tokens of none is 0.

    Two launches of the same blocks, of 32 heads of a segment of a sequence's tokens each. In the first one a block adds
    up its segment; in the second it begins with the totals of those behind, and goes through the segment's tiles from
    the last to the first. Of sums that nearly cancel no digits are lost: they are exact in float64 but for its last
    bits, and are rounded once.
    """

    def __init__(self, spec: SuffixSpec):
        self.spec, self.sequences, self.steps = spec, Sequences(spec), StepSizes(spec.steps)

    def fake_arguments(self):
        """Compiled for any B, S, H, and any number of sequences and segments."""
        B, S, H = (fake.sym() for _ in range(3))
        N = fake.sym() if self.spec.packed else B

        def of(wanted, *shape):
            return fake.tensor("fp32", shape, tuple(fake.sym64() for _ in shape), align=4) if wanted else None

        spec = self.spec
        cu = fake.tensor(spec.packed, (fake.sym(),), align=8 if spec.packed == "int64" else 4) if spec.packed else None
        totals = fake.tensor("fp64", (fake.sym(), fake.sym(), H), align=8)
        return of(True, spec.x, B, S, H), (of(spec.less, spec.less, B, S, H), of(spec.end, N, H), totals,
                                           of(not spec.steps, B, S, H), cu, self.steps.fake_operands(B, S, H))

    @cute.jit
    def __call__(self, x: cute.Tensor, others: Any, stream: cuda.CUstream):
        """others: those of `Given` behind x."""
        x = Given(x, *others)
        rows, segments, heads = x.totals.shape
        grid = [cute.ceil_div(heads, HEADS), segments, rows]  # heads first: the other dimensions end at 65535
        self.add_up(x).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)
        self.kernel(x).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    def task(self, x: Given) -> Task:
        """A thread's."""
        heads, segment, row = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        of, batch = Piece(Int32(0), x.tokens, x.tokens, row), row
        if const_expr(self.spec.packed is not None):
            of, batch = self.sequences.find(x, row), Int32(0)
        tiles = cute.ceil_div(of.end - of.first, TILE)
        each = cute.ceil_div(tiles, x.totals.shape[1])
        head, first = heads * HEADS + thread % HEADS, cutlass.min(segment * each, tiles)
        most = x.totals.shape[2]
        return Task(batch, of, cutlass.min(head, most - 1), thread // HEADS, head < most, first,
                    cutlass.min(first + each, tiles), row, segment)

    @cute.kernel
    def add_up(self, x: Given):
        """totals of all segments but a sequence's first, behind which nothing begins with it."""
        sums, t = self.room(), self.task(x)
        values, total = cute.make_rmem_tensor((EACH,), Float64), cute.make_rmem_tensor((1,), Float64)
        total[0] = Float64(0.0)
        for i in cutlass.range(cutlass.select_(t.segment > 0, t.tile1 - t.tile0, 0), unroll=1):
            self.load(values, x, t, t.tile1 - 1 - i)
            for e in cutlass.range_constexpr(EACH - 1, -1, -1):
                total[0] = total[0] + values[e]
        self.scan(sums, t, total[0])
        if t.here and t.lane == 0:
            x.totals[t.row, t.segment, t.head] = self.behind(sums, t, 0)

    @cute.kernel
    def kernel(self, x: Given):
        sums, t = self.room(), self.task(x)
        values, total = cute.make_rmem_tensor((EACH,), Float64), cute.make_rmem_tensor((1,), Float64)
        total[0] = self.behind_segment(sums, x, t)  # of what is behind the tile
        if const_expr(self.spec.end):
            if t.of.state >= 0:
                total[0] = total[0] + Float64(x.end[t.of.state, t.head])
        of_steps = self.steps.begin()
        for i in cutlass.range(t.tile1 - t.tile0, unroll=1):
            self.load(values, x, t, t.tile1 - 1 - i)
            for e in cutlass.range_constexpr(EACH - 2, -1, -1):
                values[e] = values[e] + values[e + 1]
            self.scan(sums, t, values[0])
            self.store(x, values, total[0] + self.behind(sums, t, t.lane + 1), t, t.tile1 - 1 - i, of_steps)
            total[0] = total[0] + self.behind(sums, t, 0)
        for k in cutlass.range_constexpr(2 if self.steps.there else 0):
            self.scan(sums, t, of_steps[k])
            if t.here and t.lane == 0:
                x.steps.sums[k, t.row, t.segment, t.head] = self.behind(sums, t, 0)

    def behind_segment(self, sums: cute.Tensor, x: Given, t):
        """The total of the segments behind: a lane has each sixteenth of them."""
        segments, mine = x.totals.shape[1], Float64(0.0)
        for i in range(SEGMENTS // LANES):
            n = t.segment + 1 + i * LANES + t.lane
            total = x.totals[t.row, cutlass.min(n, segments - 1), t.head]
            mine = mine + cutlass.select_(n < segments, total, Float64(0.0))
        self.scan(sums, t, mine)
        return self.behind(sums, t, 0)

    @cute.jit
    def load(self, values: cute.Tensor, x: Given, t, tile):
        """A thread's tokens; 0 past the end, where any of the tensor's is read in their place."""
        for e in cutlass.range_constexpr(EACH):
            token = tile * TILE + t.lane * EACH + e
            there = cutlass.max(cutlass.min(t.of.first + cutlass.min(token, t.of.rows - 1), x.tokens - 1), 0)
            at = t.batch, there, t.head
            value = self.sum_of_parts(x.x, at)
            if const_expr(self.spec.less):
                taken = self.sum_of_parts(x.less, at)
                if const_expr(self.steps.there):
                    taken = taken * Float64(self.steps.sizes(x.steps, at)[2])
                value = value - taken
            values[e] = cutlass.select_(token < t.of.rows, value, Float64(0.0))

    def sum_of_parts(self, x: cute.Tensor, at):
        """Over P."""
        parts = [Float64(x[(part, *at)]) for part in range(x.shape[0])]
        return sum(parts[1:], parts[0])

    def room(self) -> cute.Tensor:
        """(lane, head), and as many lanes of zeros behind the last one."""
        return tk.SharedAllocator().vector(2 * THREADS, dtype=Float64)

    def behind(self, sums: cute.Tensor, t, lane):
        """What `scan` found of a lane's values and those behind it."""
        return sums[lane * HEADS + cute.arch.thread_idx()[0] % HEADS, 0]

    @cute.jit
    def scan(self, sums: cute.Tensor, t, value):
        """The sums of each head's values from each lane to the last, for `behind`; once all are through with those
        before."""
        mine, _, _ = cute.arch.thread_idx()
        tk.sync_block()
        sums[mine, 0], sums[mine + THREADS, 0] = value, Float64(0.0)
        tk.sync_block()
        for i in cutlass.range_constexpr(LANES.bit_length() - 1):
            found = sums[mine, 0] + sums[mine + (HEADS << i), 0]
            tk.sync_block()
            sums[mine, 0] = found
            tk.sync_block()

    @cute.jit
    def store(self, x: Given, values: cute.Tensor, behind, t, tile, of_steps: Any):
        for e in cutlass.range_constexpr(EACH):
            token = tile * TILE + t.lane * EACH + e
            if t.here and token < t.of.end - t.of.first:
                at, found = (t.batch, t.of.first + token, t.head), Float32(values[e] + behind)
                if const_expr(self.steps.there):
                    self.steps.put(x.steps, at, token < t.of.rows, found, self.sum_of_parts(x.less, at), of_steps)
                else:
                    x.y[at] = found
