"""Helper warps: zero the dQ accumulator ahead of the tasks and convert finished tiles to dQ behind them, overlapped
with the main loop, so that the accumulator stays in L2."""
from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.preprocess import Rows
from tkq.attention.backward.spec import BackwardSpec
from tkq.attention.common.counters import (
    claim,
    load_acquire,
    signal,
    signal_fenced,
    wait_count,
    wait_count_backoff,
    words_of,
)
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.tile_order import l2_section_of, zero_ahead_of

WARP = 32


class Counters(NamedTuple):
    """int32, zero in the beginning. next: (3,) the numbers that are given out next, of tasks, of tiles to zero and of
    those to finish. ready: of the K/V heads of all sequences, tiles that are zero. added: likewise, warps that have
    added all of a task's dQ. With ``by_query_head`` of the query heads. With dq_reduce "first_store" or "ordered" ready
    has the words of tiles (``words_of``)."""

    next: cute.Tensor
    ready: cute.Tensor
    added: cute.Tensor

    @staticmethod
    def count(heads):
        return 3 + 2 * heads

    @staticmethod
    def of(flat: cute.Tensor) -> "Counters":
        heads = (cute.size(flat) - 3) // 2
        return Counters(*[cute.make_tensor(flat.iterator + first, cute.make_layout((n,)))
                          for first, n in ((0, 3), (3, heads), (3 + heads, heads))])


ZEROED, FINISHED = 1, 2  # of Counters.next


class HelperOperands(NamedTuple):
    """dq: (B, Sq, H, D). zero_ahead: tiles that are zeroed ahead of the last that is done with, at least; None where
    none are. With ``fuse_preprocess``, rows: of which the statistics are; known: of how many tiles, in order, they are
    there."""

    dq: cute.Tensor
    counters: Counters
    zero_ahead: Optional[Int32]
    rows: Optional[Rows] = None
    known: Optional[Int32] = None


class HelperWarps:
    """Tasks and tiles are claimed in order, each by a warp that can begin with it at once. So the kernel finishes even
    if only some of the grid's blocks are resident, as when other kernels occupy the other SMs.

      each helper   next tile to convert | zero tiles up to ``zero_ahead`` ahead of it | wait until all of its head's dQ
                    has been added | write its dQ | ..
      dQ warps      next task | wait until its head is zeroed | add | signal | ..
    """

    zeroes = True

    def __init__(self, spec: BackwardSpec, config: BackwardConfig, scheduler):
        self.spec, self.config, self.scheduler = spec, config, scheduler

    @cute.jit
    def run(self, g):
        counters = g.helper_warps.counters
        tiles, zeroed = cute.size(g.acc, mode=[0]), Int32(0)
        cute.arch.griddepcontrol_wait()  # the counters are zero
        n = claim(counters.next, FINISHED)
        while n < tiles:
            at = self.tile(g, n)
            goal = cutlass.min(n + self.zero_ahead(g, at), tiles)
            while zeroed < goal:
                zeroed = claim(counters.next, ZEROED)
                if zeroed < tiles:
                    self.zero(g, self.tile(g, zeroed))
                zeroed = zeroed + 1
            head = self.head(g, at)
            wait_count(counters.ready, head, self.tiles_of(g, at.rows_q))
            wait_count(counters.added, head, 4 * self.blocks(at.rows_k))
            self.convert(g, at)
            n = claim(counters.next, FINISHED)

    def tile(self, g, n):
        """Where tile n is: of those of a sequence, or of all equal ones, head by head; with ``by_query_head`` in the
        order of the tasks' heads."""
        def order(index, slots, *_):
            if not self.config.by_query_head:
                return index // slots, index % slots
            head, of_task = index // slots, g.heads_per_kv
            return self.scheduler.head_in_order(g, head // of_task) * of_task + head % of_task, index % slots

        return g.layout.at(False, self.config.tile, n, g.heads, order, self.config.longest_first)

    def number(self, g, at):
        """The tile's place in the workspace."""
        first = g.layout.first_tile(at, self.config.tile, g.heads, g.tiles)
        return Int64(first) + Int64(at.head) * g.tiles + at.number

    def head(self, g, at):
        """Whose counters the tile has: its K/V head, of all sequences, or its query head."""
        if self.config.by_query_head:
            return at.sequence * g.heads + at.head
        return at.sequence * g.kv_heads + at.head // g.heads_per_kv

    def tiles_of(self, g, rows):
        """Of such a head, those that have rows."""
        tiles = ceil_div(rows, self.config.tile)
        return tiles if self.config.by_query_head else tiles * g.heads_per_kv

    def blocks(self, keys):
        """Of a K/V head."""
        return ceil_div(keys, self.config.block)

    def zero_ahead(self, g, at):
        """Tiles that are zeroed ahead of this one."""
        if not self.spec.varlen:
            return g.helper_warps.zero_ahead
        l2_section = l2_section_of(at.rows_q, g.l2_section, self.config.l2_section_bytes, g.kv_heads)
        slots = at.slots * g.heads_per_kv  # by cu_seqlens: with seqused more than have rows
        return cutlass.max(g.helper_warps.zero_ahead, zero_ahead_of(l2_section, 0, slots))

    @cute.jit
    def zero(self, g, at):
        acc, zeros = g.acc[self.number(g, at), None], cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        quads = cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
        for i in cutlass.range(0, cute.size(acc) // 4, WARP, unroll=8):
            cute.autovec_copy(zeros, quads[None, i + tk.lane_id()])
        cute.arch.fence_proxy("async.global")  # bulk additions come next
        if at.number * self.config.tile < at.rows_q:
            signal_fenced(g.helper_warps.counters.ready, self.head(g, at))

    @cute.jit
    def convert(self, g, at):
        """dQ of a tile: 16 rows x 32 columns at a time, as a warp had them when they were added."""
        c, (rows, cols) = self.config, self.config.dq_parts(self.spec.width)
        slabs, quads = 4 * rows * cols, c.dq_cols // 8
        number = self.number(g, at)
        acc = cute.make_tensor(g.acc[number, None].iterator, cute.make_layout((4, WARP, quads, slabs)))
        has_contribution = self.has_contribution(g, number)
        out = g.helper_warps.dq[at.batch, None, at.head, None]
        first = at.start_q + at.number * c.tile
        for i in cutlass.range(slabs * (c.dq_cols // 32), unroll=1):
            slab, part = i // (c.dq_cols // 32), i % (c.dq_cols // 32)
            x = tk.rt_fl(32)
            self.load_added(x, has_contribution, acc[None, tk.lane_id(), None, slab], 4 * part)
            tk.mul(x, x, g.scale)
            row = first + slab // 4 // cols * 64 + (slab % 4 - tk.warp_id() % 4) * 16  # of a warpgroup's first
            col = slab // 4 % cols * c.dq_cols + 32 * part
            tk.store_narrow(columns(out, col), x, row, at.start_q + at.rows_q)

    def has_contribution(self, g, number):
        """Has anything been added up for the tile? None: always, as it began with zeroes."""

    def load_added(self, x, has_contribution, theirs, first):
        self.load(x, theirs, first)

    def load(self, x, theirs, first):
        """From L2, where it was added up."""
        mine = cute.make_tensor(x.tensor.iterator, cute.make_layout((4, 4)))
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), Float32, num_bits_per_copy=128,
                                   load_cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL)
        for j in range(4):
            cute.copy(atom, theirs[None, first + j], mine[None, j])

    # ---- for the dQ warpgroup ----------------------------------------------------------------------

    @cute.jit
    def wait_ready(self, g, t):
        """Until all tiles of the query heads of a task's K/V head are zero. A warp, before its own additions."""
        wait_count(g.helper_warps.counters.ready, t.sequence * g.kv_heads + t.head, self.tiles_of(g, t.rows_q))
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def signal_added(self, g, t):
        """A warp has added all parts of its task."""
        tk.store_wait(read=False)
        signal_fenced(g.helper_warps.counters.added, t.sequence * g.kv_heads + t.head)

    # ---- likewise, with ``by_query_head`` --------------------------------------------------------------

    @cute.jit
    def wait_head(self, g, t, head):
        """Until the tiles of a query head are zero. A warp, before its own additions."""
        wait_count(g.helper_warps.counters.ready, t.sequence * g.heads + head, self.tiles_of(g, t.rows_q))
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def signal_head_added(self, g, sequence, head, but: Constexpr[int] = 0):
        """A warp has added all that it has to; the last ``but`` additions are another's."""
        tk.store_wait(but, read=False)
        signal(g.helper_warps.counters.added, sequence * g.heads + head)


class ConvertHelperWarps(HelperWarps):
    """With dq_reduce "first_store" and "ordered": dQ of what has been added up, and no zeroes. In order, each tile as
    soon as all blocks of keys that see it are in it."""

    zeroes = False

    @cute.jit
    def run(self, g):
        counters, tiles = g.helper_warps.counters, cute.size(g.acc, mode=[0])
        cute.arch.griddepcontrol_wait()  # the counters are zero
        n = claim(counters.next, FINISHED)
        while n < tiles:
            at = self.tile(g, n)
            if const_expr(self.config.ordered):
                seen = self.scheduler.blocks_that_add(g, at.rows_q, at.rows_k, at.number)
                wait_count_backoff(words_of(g), Int32(self.number(g, at)), seen)
            else:
                wait_count_backoff(counters.added, self.head(g, at), 4 * self.blocks(at.rows_k))
            self.convert(g, self.tile(g, n))  # found again: held, it would take registers
            n = claim(counters.next, FINISHED)

    def wait_head(self, g, t, head):
        """Of zeroes: there are none."""

    def has_contribution(self, g, number):
        """Has a block stored a part of the tile? Else it sees no key, and its dQ is 0."""
        return load_acquire(words_of(g), Int32(number)) > 0

    @cute.jit
    def load_added(self, x, has_contribution, theirs, first):
        tk.zero(x)
        if has_contribution:
            self.load(x, theirs, first)


class SendersAlone(HelperWarps):
    """With ``converts_behind``: no helper warp does more than ``OrderedDqFromRegisters`` asks of it."""

    def run(self, g):
        pass


def columns(x: cute.Tensor, first) -> cute.Tensor:
    """Of (rows, columns), from column ``first``, a multiple of 8, on."""
    rows, cols = x.shape
    start = (x.iterator + first * x.stride[1]).align(16)
    return cute.make_tensor(start, cute.make_layout((rows, cols - first), stride=x.stride))
