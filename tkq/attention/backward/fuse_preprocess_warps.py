"""The statistics of query rows: of the first tiles by the preprocess kernel, of all others by the helper warps.

Before the kernel that adds up could begin, all of O and dO had to be read, 60 us for 134 MB on an H100; so it begins
with what its first tasks need. For short sequences this does not pay: the helper warps fall behind then."""
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.helper_warps import FINISHED, ZEROED, HelperWarps, columns
from tkq.attention.backward.preprocess import VECTOR, BackwardPreprocess
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.common.counters import claim, wait_count_backoff
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.sequences import in_sequences

WARP = 32


class PreprocessHelperWarps(HelperWarps):
    """Zeroes a tile's accumulator and makes its statistics. ``ready`` counts the tiles for which both are there."""

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, scheduler):
        super().__init__(spec, config, scheduler)
        self.pre = BackwardPreprocess(spec, config)
        self.ahead = 2 if spec.varlen else 1  # rows that are asked for at once: what there are registers for

    @cute.jit
    def run(self, g):
        counters = g.helper_warps.counters
        tiles, zeroed = cute.size(g.acc, mode=[0]), Int32(0)
        cute.arch.griddepcontrol_wait()  # the counters are zero
        n = claim(counters.next, FINISHED)
        while n < tiles:
            goal = cutlass.min(n + self.zero_ahead(g, self.tile(g, n)), tiles)
            while zeroed < goal:
                zeroed = claim(counters.next, ZEROED)
                if zeroed < tiles:
                    self.prepare(g, zeroed)
                zeroed = zeroed + 1
            at = self.tile(g, n)  # found again: held, it would take registers
            head = self.head(g, at)
            wait_count_backoff(counters.ready, head, self.tiles_of(g, at.rows_q))
            wait_count_backoff(counters.added, head, 4 * self.blocks(at.rows_k))
            self.convert(g, at)
            n = claim(counters.next, FINISHED)

    @cute.jit
    def prepare(self, g, n):
        if n >= g.helper_warps.known:
            self.statistics(g, self.tile(g, n))
        self.zero(g, self.tile(g, n))

    @cute.jit
    def statistics(self, g, at):
        """As ``BackwardPreprocess``. Of 32 rows each lane writes one, which it has read with those that share it."""
        tile, lanes, rows = self.config.tile, self.pre.lanes, g.helper_warps.rows
        stats, together, lane = g.stats[self.number(g, at), None], WARP // lanes, tk.lane_id() % lanes
        mine = tk.lane_id() // lanes  # of the rows that are read together
        first, end = at.start_q + at.number * tile, at.start_q + in_sequences(g.layout, at)
        shares = rows.o.shape[3] // VECTOR
        for k in cutlass.range(tile // WARP, unroll=1):
            total = Float32(0.0)
            for i in cutlass.range(lanes, unroll=self.ahead):
                row = cutlass.max(cutlass.min(first + k * WARP + i * together + mine, end - 1), 0)
                x, y = [share(z[at.batch, row, at.head, None], cutlass.min(lane, shares - 1))
                        for z in (rows.o, rows.do)]
                total = cutlass.select_(i == lane, self.pre.row_sum(x, y, lane < shares), total)
            self.pre.write(rows, stats, (at.batch, at.head, first, end), k * WARP + lane * together + mine, total)

    @cute.jit
    def convert(self, g, at):
        """As ``HelperWarps``'s, without rows behind the last: with the shortest sequences the kernel ends."""
        c, (rows, cols) = self.config, self.config.dq_parts(self.spec.width)
        quads, parts, wide = c.dq_cols // 8, c.dq_cols // 32, cols * c.dq_cols // 32
        acc = cute.make_tensor(g.acc[self.number(g, at), None].iterator,
                               cute.make_layout((4, WARP, quads, 4 * rows * cols)))
        out = g.helper_warps.dq[at.batch, None, at.head, None]
        first = at.start_q + at.number * c.tile
        groups = ceil_div(cutlass.min(at.rows_q - at.number * c.tile, c.tile), 16)
        for i in cutlass.range(groups * wide, unroll=1):
            group, part = i // wide, i % wide  # of 16 rows, of 32 columns
            x = tk.rt_fl(32)
            self.load(x, acc[None, tk.lane_id(), None, (group // 4 * cols + part // parts) * 4 + group % 4],
                      4 * (part % parts))
            tk.mul(x, x, g.scale)
            row = first + 16 * (group - tk.warp_id() % 4)  # of a warpgroup's first
            tk.store_narrow(columns(out, 32 * part), x, row, at.start_q + at.rows_q)


def share(row, i):
    """16 bytes of a row."""
    to = cute.make_rmem_tensor((VECTOR,), row.element_type)
    cute.autovec_copy(cute.local_tile(row, (VECTOR,), (i,)), to)
    return to
