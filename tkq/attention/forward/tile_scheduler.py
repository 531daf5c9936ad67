"""Which task a number means, as the producer warp asks it: in a batch of equal sequences, or of sequences of any length
one behind the other."""
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.bounds import Bounds, Edges, edges, edges_of, fall, risen
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.tile_order import heads_in_l2_section, tile_of_task, work_rank

WARP = 32


class Task(NamedTuple):
    """batch: where q and o are in their tensors' last dimension; batch_k: k and v. tile: of the head's rows. sequence:
    which one; of rows behind the last one, their number."""

    batch: Any
    batch_k: Any
    head: Any
    tile: Any
    rows_q: Any
    rows_k: Any
    sequence: Any = None


@dataclass(frozen=True)
class Dense:
    """Sequences of one length. Heads are those that a tile of rows has: H / pack for each batch element."""

    rows_q: Int32
    rows_k: Int32
    heads: Int32
    heads_per_kv: Int32
    tiles: Int32  # tasks of a head
    all_heads: Int32  # of all batch elements
    l2_section: Int32  # how many heads are worked on together
    longest_first: Constexpr[bool]

    def begin(self, schedule):
        """(what ``find`` is asked of, the schedule with the number of tasks)"""
        return self, schedule

    def find(self, number) -> Task:
        head, tile = tile_of_task(number, self.tiles, self.all_heads, self.l2_section, self.longest_first)
        batch = head // self.heads
        return Task(batch, batch, head % self.heads, tile, self.rows_q, self.rows_k, batch)

    def lengths(self, task):
        """(rows_q, rows_k) of a task, as a consumer has it."""
        return self.rows_q, self.rows_k


@dataclass(frozen=True)
class Varlen:
    """Sequence s has rows cu_q[s] .. cu_q[s + 1] of Q and cu_k[s] .. cu_k[s + 1] of K and V, of each seqused_q[s] and
    seqused_k[s] from the first; other numbers in cu: see ``bounds``. What is behind the last sequence of Q counts as
    one
    more, that sees no key: its O is 0.

    Tasks come sequence by sequence, those with the most work first (``work_rank``), inside a sequence as in ``Dense``.
    The tensors of Q, K, V and O are ``ragged``."""

    cu_q: cute.Tensor
    cu_k: cute.Tensor
    seqused_q: Optional[cute.Tensor]
    seqused_k: Optional[cute.Tensor]
    total_q: Int32
    total_k: Int32
    heads: Int32
    heads_per_kv: Int32
    queries: Constexpr[int]  # of a task
    block: Constexpr[int]  # keys of a tile
    key_bytes: Constexpr[int]  # of a key and its value
    l2_section_bytes: Constexpr[int]
    longest_first: Constexpr[bool]

    @property
    def count(self):
        return self.cu_q.shape[0] - 1

    @property
    def bounds(self):
        return Bounds(self.cu_q, self.total_q), Bounds(self.cu_k, self.total_k)

    def in_use(self, s, rows, used):
        """The number of rows of sequence s that are in use."""
        if used is None:
            return rows
        return cutlass.min(rows, cutlass.max(used[cutlass.min(s, self.count - 1)], 0))

    def lengths_of(self, s, e: Edges):
        """(where Q ends, rows_q, where K ends, rows_k) of sequence s, 0 .. count. Never beyond the tensor, whatever cu
        and used say."""
        rows_q = self.in_use(s, cutlass.max(e.end_q - e.begin_q, 0), self.seqused_q)
        rows_k = self.in_use(s, cutlass.max(e.end_k - e.begin_k, 0), self.seqused_k)
        # the rest of Q, and beyond that nothing
        rest = cutlass.select_(s == self.count, self.total_q - e.begin_q, Int32(0))
        rows_q = cutlass.select_(s >= self.count, rest, rows_q)
        rows_k = cutlass.select_(s >= self.count, Int32(0), rows_k)
        return e.begin_q + rows_q, rows_q, e.begin_k + rows_k, rows_k

    def lengths(self, task):
        return task["rows_q"], task["rows_k"]

    def weigh(self, s, e: Edges):
        """(tiles of sequence s, rank of its work)"""
        _end_q, rows_q, _end_k, rows_k = self.lengths_of(s, e)
        return ceil_div(rows_q, self.queries), work_rank(ceil_div(rows_k, self.block))

    @cute.jit
    def survey(self, falls: Constexpr[bool]):
        """(tiles of all sequences, which ranks there are: a bit for each; and FALLS where cu falls). A whole warp.
        falls: is that known?"""
        tiles, ranks = Int32(0), Int32(FALLS if falls else 0)
        for base in cutlass.range(0, self.count + 1, WARP, unroll=1 if falls else 4):
            s = base + tk.lane_id()
            e = risen(*self.bounds, base) if const_expr(falls) else edges(*self.bounds, s)
            n, rank = self.weigh(s, e)
            tiles = tiles + n
            ranks = ranks | cutlass.select_(n > 0, Int32(1) << rank, Int32(0))
            ranks = ranks | cutlass.select_(fall(e), Int32(FALLS), Int32(0))
        return cute.arch.warp_reduction(tiles, lambda a, b: a + b), cute.arch.warp_reduction(ranks, lambda a, b: a | b)

    @cute.jit
    def surveyed(self):
        tiles, ranks = self.survey(False)
        if ranks < 0:
            tiles, ranks = self.survey(True)
        return tiles, ranks

    def begin(self, schedule):
        tiles, ranks = self.surveyed()
        scan = Scan(self, cute.make_rmem_tensor((4,), Int32))
        scan.start(ranks)
        return scan, replace(schedule, tasks=tiles * self.heads)


RANKS, BASE, BEFORE, UPTO = range(4)
FALLS = -(1 << 31)  # beside the ranks, which are below 31


@dataclass(frozen=True)
class Scan:
    """A warp that walks the sequences, 32 at a time: those of the first rank, then those of the next. Numbers
    are asked for in rising order, so it never turns back.

    state: ranks still to come, this one included, and FALLS; the first of the 32 sequences; tiles before them; tiles of
    them up to this lane's, inclusive. Tiles of other ranks do not count."""

    sequences: Varlen
    state: cute.Tensor

    def start(self, ranks):
        self.state[RANKS] = ranks
        self.state[BASE] = Int32(-WARP)
        self.state[BEFORE] = Int32(0)
        self.state[UPTO] = Int32(0)

    def end(self):
        """Tiles before these 32 sequences and of them."""
        return self.state[BEFORE] + cute.arch.shuffle_sync(self.state[UPTO], WARP - 1)

    @cute.jit
    def advance(self):
        """To the next 32 sequences."""
        state = self.state
        ranks, base = state[RANKS], state[BASE] + WARP
        if base > self.sequences.count:
            base, ranks = Int32(0), ranks & (ranks - 1)
        s, all_of = base + tk.lane_id(), self.sequences
        tiles, rank = all_of.weigh(s, edges(*all_of.bounds, s))
        if ranks < 0:
            tiles, rank = all_of.weigh(s, risen(*all_of.bounds, base))
        tiles = cutlass.select_((ranks & -ranks) == (Int32(1) << rank), tiles, Int32(0))
        for d in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(tiles, 1 << d)
            tiles = tiles + cutlass.select_(tk.lane_id() >= 1 << d, below, Int32(0))
        state[BEFORE] = self.end()
        state[RANKS], state[BASE], state[UPTO] = ranks, base, tiles

    @cute.jit
    def find(self, number):
        """The task of a number below the number of tasks."""
        all_of, heads = self.sequences, self.sequences.heads
        unit = number // heads
        while unit >= self.end():
            self.advance()
        unit = unit - self.state[BEFORE]
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(self.state[UPTO] <= unit))
        before = cute.arch.shuffle_sync(self.state[UPTO], cutlass.max(lane - 1, 0))
        if lane == 0:
            before = Int32(0)
        s = self.state[BASE] + lane
        e = edges_of(*all_of.bounds, s, self.state[RANKS] < 0)
        end_q, rows_q, end_k, rows_k = all_of.lengths_of(s, e)
        kv_bytes = cutlass.max(cutlass.min(rows_k, Int32(1 << 20)), 1) * all_of.key_bytes
        l2_section = heads_in_l2_section(kv_bytes, all_of.l2_section_bytes, all_of.heads_per_kv, heads)
        within = number - (self.state[BEFORE] + before) * heads
        head, tile = tile_of_task(within, ceil_div(rows_q, all_of.queries), heads, l2_section, all_of.longest_first)
        return Task(end_q, end_k, head, tile, rows_q, rows_k, s)
