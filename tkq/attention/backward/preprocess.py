"""Before attention's backward: the statistics of the query rows, and zeroes for dQ to be added up in."""
from typing import Any, NamedTuple, Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.common.query_mask import QueryExtent, key_blocks_of
from tkq.attention.common.sequences import in_sequences, tile_order

THREADS = 256
VECTOR = 8  # elements of 16 bits in one access
COUNTERS = 8  # that a block, one of each tile, clears: there are at most 5 and 2 of each tile, or 1 and 4


class Rows(NamedTuple):
    """Of all query rows, with a batch dimension: do, o (B, Sq, H, Dv), lse, dlse (B, H, Sq) fp32."""

    do: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    dlse: Optional[cute.Tensor]


class Workspace(NamedTuple):
    """stats: (tile, 2 x rows of a tile). acc: (tile, floats), where dQ is added up. counters: where blocks
    take one task after the other."""

    stats: cute.Tensor
    acc: Optional[cute.Tensor] = None
    counters: Optional[cute.Tensor] = None
    dkv_partials: Any = None
    dq_serial: Any = None


class BackwardPreprocess:
    """stats[tile] = -lse * log2(e) and dlse - rowsum(o * do) of the tile's rows; acc and counters = 0.

    One block a tile of one head. A row past the end, and one that sees no key, has -inf and 0: then exp2(.. - inf) is
    0, and nothing of it enters a gradient. Lanes that share a row read 16 bytes of it each."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        self.spec, self.tile, self.block = spec, config.tile, config.block
        self.lanes = spec.width // VECTOR  # of a row
        self.together = THREADS // self.lanes  # rows
        if self.tile % self.together:
            raise ValueError(f"BackwardPreprocess: tile is {self.tile}, allowed are multiples of {self.together}")

    @cute.jit
    def __call__(self, rows: Rows, workspace: Workspace, layout, stream: cuda.CUstream):
        batch, heads, _ = rows.lse.shape
        tiles = layout.slots(False, self.tile)
        self.kernel(rows, workspace, layout).launch(grid=[tiles * heads * batch, 1, 1], block=[THREADS, 1, 1],
                                                    stream=stream)

    @cute.kernel
    def kernel(self, rows: Rows, workspace: Workspace, layout: Any):
        cute.arch.griddepcontrol_launch_dependents()
        # the first heads last: they are in L2 when the next kernel begins
        n, t = Int32(cute.arch.grid_dim()[0] - cute.arch.block_idx()[0]) - 1, Int32(cute.arch.thread_idx()[0])
        at = self.place(layout, n, rows.lse.shape[1])
        stats, acc, counters, dkv_partials, dq_serial = workspace
        if const_expr(dq_serial is not None):
            self.zero_if(acc[Int64(n), None], t, n >= dq_serial.tiles)
            if n < dq_serial.tiles:
                self.zero_unseen(layout, dq_serial, n, rows.lse.shape[1], t)
        elif const_expr(acc is not None):
            self.zero(acc[Int64(n), None], t)
        if const_expr(counters is not None):
            i = n * COUNTERS + t
            if t < COUNTERS and i < cute.size(counters):
                counters[i] = Int32(0)
        if const_expr(dkv_partials is not None):
            for i in cutlass.range(n * THREADS + t, cute.size(dkv_partials.counts),
                                   Int32(cute.arch.grid_dim()[0]) * THREADS):
                dkv_partials.counts[i] = Int32(0)
        sums = self.row_sums(rows, at, t)
        for i in cutlass.range_constexpr(self.tile // self.together):
            if t % self.lanes == 0:
                self.write(rows, stats[Int64(n), None], at, i * self.together + t // self.lanes, sums[i])

    def place(self, layout, n, heads):
        """(batch, head, the tile's first row, where the sequence's rows end)"""
        at = layout.at(False, self.tile, *tile_order(layout, self.tile, n, heads))
        return at.batch, at.head, at.start_q + at.number * self.tile, at.start_q + in_sequences(layout, at)

    @cute.jit
    def zero_if(self, acc, t, condition):
        if condition:
            self.zero(acc, t)

    @cute.jit
    def zero_unseen(self, layout, dq_serial, n, heads, t):
        """dQ of a tile that sees no key, which no block comes by."""
        at = layout.at(False, self.tile, *tile_order(layout, self.tile, n, heads))
        right = dq_serial.right if self.spec.right else None
        extent = QueryExtent(at.rows_q, at.rows_k, self.tile, self.block, None, right)
        if key_blocks_of(extent, at.number * self.tile).end <= 0:
            zeros = cute.make_rmem_tensor((VECTOR,), dq_serial.dq.element_type)
            zeros.fill(0.0)
            for i in cutlass.range_constexpr(self.tile // self.together):
                row, lane = at.number * self.tile + i * self.together + t // self.lanes, t % self.lanes
                if row < at.rows_q and lane * VECTOR < dq_serial.dq.shape[3]:
                    to = dq_serial.dq[at.batch, at.start_q + row, at.head, None]
                    cute.autovec_copy(zeros, cute.local_tile(to, (VECTOR,), (lane,)))

    def zero(self, acc, t):
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        quads = cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
        for i in range(cute.size(acc) // 4 // THREADS):
            cute.autovec_copy(zeros, quads[None, i * THREADS + t])

    def row_sums(self, rows, at, t):
        """rowsum(o * do) of each row that this thread has a share of: one row in ``together``."""
        batch, head, row0, end = at
        o, do = rows.o, rows.do
        a, b = [[cute.make_rmem_tensor((VECTOR,), o.element_type) for _ in range(self.tile // self.together)]
                for _ in range(2)]
        shares = o.shape[3] // VECTOR  # of a row: lanes beyond repeat the last, and count for nothing
        lane = cutlass.min(t % self.lanes, shares - 1)
        for i in range(self.tile // self.together):  # all loads first
            row = cutlass.max(cutlass.min(row0 + i * self.together + t // self.lanes, end - 1), 0)
            for x, to in ((o, a[i]), (do, b[i])):
                cute.autovec_copy(cute.local_tile(x[batch, row, head, None], (VECTOR,), (lane,)), to)
        return [self.row_sum(x, y, t % self.lanes < shares) for x, y in zip(a, b)]

    def row_sum(self, x, y, counts):
        total = Float32(0.0)
        for e in range(VECTOR):
            total = total + Float32(x[e]) * Float32(y[e])
        total = cutlass.select_(counts, total, Float32(0.0))
        return cute.arch.warp_reduction(total, lambda p, q: p + q, threads_in_group=self.lanes)

    @cute.jit
    def write(self, rows, stats, at, i, total):
        batch, head, row0, end = at
        first, second = -Float32.inf, Float32(0.0)
        if row0 + i < end:
            of_row = rows.lse[batch, head, row0 + i]
            if of_row != -Float32.inf:
                first, second = -of_row * tk.LOG2E, -total
                if const_expr(rows.dlse is not None):
                    second = second + rows.dlse[batch, head, row0 + i]
        stats[i] = first
        stats[self.tile + i] = second


TILES_PREPROCESSED_BEFORE = 4  # for each SM: two of its first task, and those of its neighbours' heads


def tile_by_number(layout, size, n, heads, longest_first):
    """Where tile n is, as ``HelperWarps.tile``."""
    return layout.at(False, size, n, heads, lambda index, slots, *_: (index // slots, index % slots), longest_first)


class PreprocessFirstTiles(BackwardPreprocess):
    """The statistics of the first ``known`` tiles in the order of ``HelperWarps``; counters = 0."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig):
        super().__init__(spec, config)
        self.longest_first = config.longest_first

    @cute.jit
    def __call__(self, rows: Rows, workspace: Workspace, layout, known: Int32, stream: cuda.CUstream):
        self.kernel(rows, workspace, layout).launch(grid=[known, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, rows: Rows, workspace: Workspace, layout: Any):
        cute.arch.griddepcontrol_launch_dependents()
        n, t = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.thread_idx()[0])
        counters, heads = workspace.counters, rows.lse.shape[1]
        for i in cutlass.range(n * THREADS + t, cute.size(counters), Int32(cute.arch.grid_dim()[0]) * THREADS):
            counters[i] = Int32(0)
        at = tile_by_number(layout, self.tile, n, heads, self.longest_first)
        tiles = layout.slots(False, self.tile)
        number = Int64(layout.first_tile(at, self.tile, heads, tiles)) + Int64(at.head) * tiles + at.number
        place = at.batch, at.head, at.start_q + at.number * self.tile, at.start_q + in_sequences(layout, at)
        stats, sums = workspace.stats[number, None], self.row_sums(rows, place, t)
        for i in cutlass.range_constexpr(self.tile // self.together):
            if t % self.lanes == 0:
                self.write(rows, stats, place, i * self.together + t // self.lanes, sums[i])
