"""Where the rows of a task of attention's backward lie: in a batch of equal sequences, or of sequences of any length
one behind the other.

Rows are counted in *slots* of a size: in each sequence a slot begins every ``size`` rows. Of sequences of any length,
sequence s has the slots from cu[s] // size + s on: enough for its rows, without a sum over the sequences before it. The
last slot of a sequence may hold no row.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, const_expr

import tkq.tile as tk
from tkq.attention.common import bounds
from tkq.attention.common.bounds import Bounds
from tkq.attention.common.integers import ceil_div
from tkq.attention.common.operands import Sequences

WARP = 32


class TileCoord(NamedTuple):
    """Where a task is. sequence: which. batch_q, batch_k: TMA's coordinate of its rows of Q and of K; batch: that of
    tensors with a batch dimension, and start_q: the number of its first row there. head: in the batch element. number:
    index of the slot among the sequence's ``slots``. rows_q, rows_k: how many it has."""

    sequence: Any
    batch_q: Any
    batch_k: Any
    batch: Any
    start_q: Any
    head: Any
    number: Any
    rows_q: Any
    rows_k: Any
    slots: Any


@dataclass(frozen=True)
class DenseBatch:
    """Sequences of rows_q queries and rows_k keys each. q_per: a head has a multiple of this number of slots of
    queries, the last ones perhaps without a row."""

    rows_q: Int32
    rows_k: Int32
    batches: Int32
    q_per: Constexpr[int] = 1

    ragged: Constexpr[bool] = False

    @property
    def sequences(self):
        return self.batches

    def slots(self, of_keys: bool, size: int):
        """Of one head: of all sequences that lie one behind the other."""
        return ceil_div(self.rows_k, size) if of_keys else ceil_div(self.rows_q, size * self.q_per) * self.q_per

    def at(self, of_keys: bool, size: int, index, heads, order: Callable, longest_first=False) -> TileCoord:
        """Task ``index``, a slot of K or of Q of one of ``heads`` heads of each batch element.

        order(index, slots, heads, rows_q) -> (head, slot): of those of a sequence, or of all equal ones. longest_first:
        of other sequences."""
        slots = self.slots(of_keys, size)
        head, number = order(index, slots, heads * self.batches, self.rows_q)
        batch = head // heads
        return TileCoord(batch, batch, batch, batch, 0, head % heads, number, self.rows_q, self.rows_k, slots)

    def first_tile(self, at: TileCoord, size: int, heads, tiles):
        """The number of the sequence's first tile of query head 0, where each of ``heads`` has ``tiles``."""
        return at.sequence * heads * tiles


@dataclass(frozen=True)
class VarlenBatch:
    """Sequence s: rows cu[s] .. cu[s + 1], of which used[s] are in use, the first ones; where cu does not rise, see
    ``bounds``. What is behind the last sequence counts as one more, which has nothing of the other kind: its gradient
    is 0."""

    given: Sequences
    total_q: Int32
    total_k: Int32

    ragged: Constexpr[bool] = True

    @property
    def count(self):
        return self.given.cu_q.shape[0] - 1

    @property
    def sequences(self):
        return self.count + 1

    @property
    def bounds(self):
        return Bounds(self.given.cu_q, self.total_q), Bounds(self.given.cu_k, self.total_k)

    def slots(self, of_keys: bool, size: int):
        return (self.total_k if of_keys else self.total_q) // size + self.count + 1

    def at(self, of_keys: bool, size: int, index, heads, order: Callable, longest_first=False) -> TileCoord:
        """As in `DenseBatch`. A whole warp. The slot may be one without a row. longest_first: with up to 31 sequences,
        those of more queries come before others."""
        find = self.longest_first if longest_first else self.sequence_of
        s, first, slots, begin_q, begin_k = find(of_keys, size, index // heads)
        q, k = self.bounds
        start_q, rows_q = self.rows(s, begin_q, q, self.given.seqused_q)
        start_k, rows_k = self.rows(s, begin_k, k, self.given.seqused_k)
        rest = s >= self.count
        rows_q, rows_k = ((cutlass.select_(rest, Int32(0), rows_q), rows_k) if of_keys else
                          (rows_q, cutlass.select_(rest, Int32(0), rows_k)))
        head, number = order(index - first * heads, slots, heads, rows_q)
        return TileCoord(s, start_q + rows_q, start_k + rows_k, 0, start_q, head, number, rows_q, rows_k, slots)

    def first_tile(self, at: TileCoord, size: int, heads, tiles):
        return cutlass.select_(at.sequence == 0, Int32(0), at.start_q // size) + at.sequence  # as first_slot

    @cute.jit
    def sequence_of(self, of_keys: Constexpr[bool], size: Constexpr[int], slot):
        """(the sequence that has the slot, its first slot, how many it has, where it begins in Q and in K). Each lane
        asks about one of 32: first, which 32 the sequence is of. No branch depends on what is found, or the compiler
        would prepare for lanes that go apart."""
        count, lane, mine, its = self.count, tk.lane_id(), self.bounds[of_keys], self.bounds[not of_keys]
        found, base, before, other = Int32(0), Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(0, count + 1, WARP, unroll=2):
            found = cutlass.max(found, bounds.highest(mine.at(first + lane)))
            begun = found // size + cutlass.min(first + WARP - 1, count) <= slot  # all of these 32
            base = cutlass.select_(begun, first + WARP, base)
            before = cutlass.select_(begun, found, before)
            other = cutlass.select_(begun, cutlass.max(other, its.at(first + lane)), other)
        base = cutlass.min(base, count // WARP * WARP)  # where all have begun, the last 32 once more
        s, begin = base + lane, mine.rising(base, before)
        here = (s <= count) & (self.first_slot(size, s, begin) <= slot)
        number = cute.arch.popc(cute.arch.vote_ballot_sync(here))
        begin = cutlass.select_(number > 0, cute.arch.shuffle_sync(begin, cutlass.max(number - 1, 0)), before)
        s = cute.arch.make_warp_uniform(cutlass.max(base + number - 1, 0))
        other = bounds.highest(cutlass.max(other, cutlass.select_(base + lane <= s, its.at(base + lane), Int32(0))))
        first, slots = self.slots_of(size, s, begin, mine)
        return (s, first, slots, other, begin) if const_expr(of_keys) else (s, first, slots, begin, other)

    @cute.jit
    def longest_first(self, of_keys: Constexpr[bool], size: Constexpr[int], slot):
        """As ``sequence_of``, with slots counted in another order. Each lane places one sequence."""
        s, first, slots, begin_q, begin_k = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        if self.count >= WARP:
            s, first, slots, begin_q, begin_k = self.sequence_of(of_keys, size, slot)
        else:
            lane, (q, k) = tk.lane_id(), self.bounds
            of_q = q.rising(Int32(0), Int32(0))
            begin = k.rising(Int32(0), Int32(0)) if const_expr(of_keys) else of_q
            mine = self.slots_of(size, lane, begin, self.bounds[of_keys])[1]
            mine = cutlass.select_(lane <= self.count, mine, Int32(0))
            rows = cutlass.select_(lane < self.count, self.rows(lane, of_q, q, self.given.seqused_q)[1], Int32(-1))
            before = Int32(0)
            for other in cutlass.range_constexpr(WARP):
                their, theirs = cute.arch.shuffle_sync(rows, other), cute.arch.shuffle_sync(mine, other)
                earlier = (their > rows) | ((their == rows) & (other < lane))
                before = before + cutlass.select_(earlier, theirs, Int32(0))
            here = cute.arch.vote_ballot_sync((before <= slot) & (slot < before + mine))
            s = cute.arch.make_warp_uniform(cute.arch.popc((here & -here) - 1))
            first, slots = cute.arch.shuffle_sync(before, s), cute.arch.shuffle_sync(mine, s)
            begin_q, begin_k = (bounds.highest(of.at(cutlass.min(lane, s))) for of in (q, k))
        return s, first, slots, begin_q, begin_k

    def first_slot(self, size, s, begin):
        """Of sequence s, 0 .. count."""
        # slots without rows where the first one begins later
        return cutlass.select_(s == 0, Int32(0), begin) // size + s

    def slots_of(self, size, s, begin, of: Bounds):
        """(the first slot of sequence s, 0 .. count, how many it has): up to the next one's, or, of the rest, all."""
        first = self.first_slot(size, s, begin)
        return first, cutlass.select_(s >= self.count, of.total, of.end(s, begin)) // size + s + 1 - first

    def rows(self, s, begin, of: Bounds, used):
        """(first, number of rows) of sequence s, 0 .. count. Never beyond the tensor, whatever cu and used say."""
        rows = of.end(s, begin) - begin
        if used is not None:
            rows = cutlass.min(rows, cutlass.max(used[cutlass.min(s, self.count - 1)], 0))
        return begin, cutlass.select_(s >= self.count, of.total - begin, rows)


def tile_order(layout, size, n, heads):
    """For ``at``, the index, heads and order of tile n of all heads, which lie head by head in the workspace."""
    tiles = layout.slots(False, size)
    if layout.ragged:
        return n % tiles * heads, heads, lambda index, *_: (n // tiles, index // heads)
    return n, heads, lambda index, slots, *_: (index // slots, index % slots)


def in_sequences(layout, at: TileCoord):
    """How many rows of a task's are of a sequence: those of none have no part in anything."""
    if not layout.ragged:
        return at.rows_q
    return cutlass.select_(at.sequence < layout.count, at.rows_q, Int32(0))


def piece(layout, x: tk.gl, rows) -> tk.gl:
    """x as a task of a sequence of ``rows`` rows sees it."""
    return x.part(rows) if layout.ragged else x


def loads(x, type: tk.st, ragged: bool) -> tk.gl:
    """x ([batch,] row, head, col) for TMA: (row, col, head, batch), or ragged. Rows past a sequence's end come as
    zeros: a product with 0 would not hide what is there."""
    x = heads_outside(x, ragged)
    return tk.gl.load(tk.ragged(x) if ragged else x, type)


def stores(x, type: tk.st, ragged: bool) -> tk.gl:
    """Likewise. Rows past a sequence's end are not written."""
    x = heads_outside(x, ragged)
    return tk.gl.store(tk.ragged_store(x) if ragged else x, type)


def heads_outside(x, ragged: bool):
    """([batch,] row, head, col) as (row, col, head [, batch])."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, [0, 2, 1] if ragged else [1, 3, 2, 0]))


def with_batch(x, ragged: bool):
    """x with a batch dimension, of 1 where rows lie one behind the other."""
    if not ragged:
        return x
    return cute.make_tensor(x.iterator, cute.make_layout((1, *x.shape), stride=(0, *x.stride)))
