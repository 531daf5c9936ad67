"""Sums from each token to the last: of what gates' gradients are made of, in float64, in an order that the number of
tokens alone decides."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, const_expr

import tkq.tile as tk
from tkq.linear_attention.engine.packed import Piece, Sequences
from tkq.linear_attention.spec import SuffixSpec
from tkq.runtime.compile import fake

HEADS, LANES, EACH = 8, 64, 16  # of a block: heads; threads of each; neighbouring tokens of a thread
TILE = LANES * EACH
SEGMENTS = 32  # blocks of a sequence's head, at most


class Given(NamedTuple):
    """As `SuffixSums` has them. cu: None, or (N + 1,), where N packed sequences begin and end."""

    x: cute.Tensor
    less: Optional[cute.Tensor]
    factor: Optional[cute.Tensor]
    end: Optional[cute.Tensor]
    y: cute.Tensor
    cu: Optional[cute.Tensor]

    @property
    def tokens(self):
        return self.x.shape[1]


@dataclass(frozen=True)
class Task:
    """Tokens tile0 * TILE to tile1 * TILE of one head of one sequence, and this thread's place in a tile. of: where
    the sequence's tokens are."""

    batch: Int32
    of: Piece
    head: Int32
    lane: Int32
    here: cutlass.Boolean
    tile0: Int32
    tile1: Int32
    tiles: Int32


class SuffixSums:
    """y[b, t, h] = end[b, h] + the sum of x[b, i, h] - factor[b, i, h] * less[b, i, h] over i >= t.

    x, less, factor: (B, S, H) fp32, of any strides. end: (B, H). y: (B, S, H). Of packed sequences B is 1, end is
    (N, H), and sums end with a sequence; y of tokens of none is 0. A block has 8 heads of a segment of a sequence's
    tokens: it adds up all that is behind the segment, each thread its part, and then goes through the segment's tiles
    from the last to the first. Nothing is exchanged between blocks: what is behind is read again, from L2, at most
    31 times. Of sums that nearly cancel no digits are lost: they are exact in float64 but for its last bits, and are
    rounded once.
    """

    def __init__(self, spec: SuffixSpec):
        self.spec, self.sequences = spec, Sequences(spec)

    def fake_arguments(self):
        """Compiled for any B, S, H and N."""
        B, S, H = (fake.sym() for _ in range(3))
        N = fake.sym() if self.spec.packed else B

        def of(wanted, *shape):
            return fake.tensor("fp32", shape, tuple(fake.sym64() for _ in shape), align=4) if wanted else None

        spec = self.spec
        cu = fake.tensor(spec.packed, (fake.sym(),), align=8 if spec.packed == "int64" else 4) if spec.packed else None
        return of(True, B, S, H), (of(spec.less, B, S, H), of(spec.factor, B, S, H), of(spec.end, N, H),
                                   of(True, B, S, H), cu)

    @cute.jit
    def __call__(self, x: cute.Tensor, others: Any, stream: cuda.CUstream):
        """others: those of `Given` behind x."""
        x = Given(x, *others)
        segments = cute.ceil_div(cute.ceil_div(x.tokens, TILE), cute.ceil_div(cute.ceil_div(x.tokens, TILE), SEGMENTS))
        if const_expr(self.spec.packed is not None):  # as many as a sequence of the mean length has tiles
            mean = cute.ceil_div(x.tokens, TILE) // cutlass.max(x.cu.shape[0] - 1, 1)
            segments = cutlass.max(cutlass.min(mean, SEGMENTS), 1)
        self.kernel(x).launch(
            grid=[cute.ceil_div(x.x.shape[2], HEADS), segments, self.sequences.blocks(x.x, x.cu)],
            block=[HEADS * LANES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: Given):
        sums = tk.SharedAllocator().vector(HEADS * 2 * LANES, dtype=Float64)
        heads, segment, batch = cute.arch.block_idx()  # heads first: the grid's other dimensions end at 65535
        thread, _, _ = cute.arch.thread_idx()
        of = Piece(Int32(0), x.tokens, x.tokens, batch)
        if const_expr(self.spec.packed is not None):
            of, batch = self.sequences.find(x, batch), Int32(0)
        tiles = cute.ceil_div(of.end - of.first, TILE)
        each = cute.ceil_div(tiles, cute.arch.grid_dim()[1])
        head, first = heads * HEADS + thread % HEADS, cutlass.min(segment * each, tiles)
        here = head < x.x.shape[2]
        t = Task(batch, of, head, thread // HEADS, here, first, cutlass.min(first + each, tiles), tiles)
        mine = thread % HEADS * 2 * LANES + t.lane
        sums[mine + LANES, 0] = Float64(0.0)  # behind the last lane
        values = cute.make_rmem_tensor((EACH,), Float64)
        total = cute.make_rmem_tensor((1,), Float64)  # of what is behind the tile
        total[0] = Float64(0.0)
        for i in cutlass.range(t.tiles - t.tile1, unroll=1):
            self.load(values, x, t, t.tiles - 1 - i)
            for e in cutlass.range_constexpr(EACH):
                total[0] = total[0] + values[e]
        self.scan(sums, mine, total[0])
        total[0] = sums[mine - t.lane, 0]
        if const_expr(self.spec.end):
            if t.here and t.of.state >= 0:
                total[0] = total[0] + Float64(x.end[t.of.state, t.head])
        for i in cutlass.range(t.tile1 - t.tile0, unroll=1):
            self.load(values, x, t, t.tile1 - 1 - i)
            for e in cutlass.range_constexpr(EACH - 2, -1, -1):
                values[e] = values[e] + values[e + 1]
            self.scan(sums, mine, values[0])
            self.store(x.y, values, total[0] + sums[mine + 1, 0], t, t.tile1 - 1 - i)
            total[0] = total[0] + sums[mine - t.lane, 0]

    @cute.jit
    def load(self, values: cute.Tensor, x: Given, t, tile):
        """A thread's tokens; 0 past the end."""
        for e in cutlass.range_constexpr(EACH):
            token = tile * TILE + t.lane * EACH + e
            values[e] = Float64(0.0)
            if t.here and token < t.of.rows:
                at = t.batch, t.of.first + token, t.head
                value = Float64(x.x[at])
                if const_expr(self.spec.less):
                    taken = Float64(x.less[at])
                    if const_expr(self.spec.factor):
                        taken = taken * Float64(x.factor[at])
                    value = value - taken
                values[e] = value

    @cute.jit
    def scan(self, sums: cute.Tensor, mine, value):
        """sums[mine] = the sum of the head's values from this lane to the last; once all are through with those
        before."""
        tk.sync_block()
        sums[mine, 0] = value
        tk.sync_block()
        for i in cutlass.range_constexpr(LANES.bit_length() - 1):
            found = sums[mine, 0] + sums[mine + (1 << i), 0]
            tk.sync_block()
            sums[mine, 0] = found
            tk.sync_block()

    @cute.jit
    def store(self, y: cute.Tensor, values: cute.Tensor, behind, t, tile):
        for e in cutlass.range_constexpr(EACH):
            token = tile * TILE + t.lane * EACH + e
            if t.here and token < t.of.end - t.of.first:
                y[t.batch, t.of.first + token, t.head] = Float32(values[e] + behind)
