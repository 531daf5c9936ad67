"""Which keys of which tasks a block of threads takes: the same loop for producers and consumers."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from tkq.attention.decode import words
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.planner import blocks_of

X, END, BATCH, TASK, LENGTH, PREFIX, WEIGHT = range(7)  # of a walk's place


class Segment(NamedTuple):
    """Blocks first .. end of keys of a task: sequence ``batch``, K/V head ``head``, ``tile`` of packed queries.

    length: of the sequence, 0 where it is not in the cache. inside: is it? split: the segment's number among the task's
    ``splits``. begin: slot of the task's first split; others: of its second. task: the number of its counter. position:
    where the work behind it begins. last: does the task end with it?

    source: row of the table; place, row: of q, where the first of its ``queries`` is. Of ragged queries a tile is a
    sequence of the plan, and ``batch`` is its number; a tile of rows that its queries do not have has no blocks."""

    batch: Int32
    head: Int32
    tile: Int32
    first: Int32
    end: Int32
    length: Int32
    inside: cutlass.Boolean
    split: Int32
    splits: Int32
    begin: Int32
    others: Int32
    task: Int32
    position: Int32
    last: cutlass.Boolean
    source: Int32
    place: Int32
    row: Int32
    queries: Int32


class Walk:
    """The part of the plan's work that a block has, task by task. Every thread of a role calls it, with the same
    result.

    A place is (7,) in registers: the position, the part's end, the sequence, its task, and of the sequence the length,
    where its work begins, and the positions of each of its tasks. The first one comes with one load from the plan."""

    STEP = 2  # slots from a task's second split to its third: each part has two slots, for its first and its last task

    def __init__(self, spec):
        self.fixed, self.ragged = spec.fixed_splits, spec.ragged

    @cute.jit
    def each_segment(self, g, work: Constexpr):
        """``work(segment)`` for each segment of this block's part that has keys."""
        at = self.begin(g)
        while at[X] < at[END]:
            s = self.segment(g, at)
            if s.first < s.end:
                work(s)
            self.advance(g, at, s)

    @cute.jit
    def begin(self, g):
        """The first place of this block's part; END is X where there is none."""
        at, me = cute.make_rmem_tensor((7,), Int32), cute.arch.block_idx()[0]
        part, total = g.plan[words.PART], g.plan[words.TOTAL]
        batch, length, prefix, weight = (g.plan[words.STARTS + words.RECORD * me + i] for i in range(4))
        end = cutlass.min((me + 1) * part, total)
        at[X] = cutlass.min(me * part, total)
        at[END] = cutlass.select_(self.matches(g), end, at[X])
        at[BATCH], at[LENGTH], at[PREFIX], at[WEIGHT] = batch, length, prefix, weight
        at[TASK] = (at[X] - prefix) // cutlass.max(weight, 1)
        return at

    def matches(self, g):
        """Was the plan made for such a call? Also by all blocks of threads that there are."""
        given = {words.MAGIC: Int32(words.NUMBER), words.BATCH: g.batch, words.HEADS_KV: g.heads_kv,
                 words.GROUP: g.group, words.QUERIES: g.queries, words.KEY_BLOCK: Int32(g.key_block),
                 words.FIXED: g.split, words.LEFT: g.left, words.PARTS: Int32(cute.arch.grid_dim()[0])}
        same = cutlass.Boolean(True)
        for place, number in given.items():
            same = same & (g.plan[place] == number)
        return same

    def segment(self, g, at) -> Segment:
        """From the place on, inside of the part's end."""
        x, end, batch, task, length = at[X], at[END], at[BATCH], at[TASK], at[LENGTH]
        inside = (length >= 0) & (length <= g.capacity)
        weight = at[WEIGHT]
        start = at[PREFIX] + task * weight
        first_key, end_key = blocks_of(length, g.queries, g.left, g.key_block)
        blocks = cutlass.max(end_key - first_key, 1)
        # of a length that is none, a window may begin where numbers of keys end
        first_key = cutlass.select_(inside, first_key, Int32(0))
        stop = cutlass.min(start + weight, end)
        number = batch * (g.heads_kv * g.tiles) + task
        if self.fixed:
            first = (x - start) * g.split
            last = cutlass.min(first + g.split, blocks)
            stop = x + 1
            split, splits = x - start, weight
            begin = number * self.most_splits(g)
            others = begin + 1
        else:
            overhead, part = g.plan[words.OVERHEAD], g.plan[words.PART]
            first = cutlass.max(x - start - overhead, 0)
            last = cutlass.min(stop - start - overhead, blocks)
            me, head_part = cute.arch.block_idx()[0], (start + overhead) // part
            split, splits = me - head_part, (start + weight - 1) // part - head_part + 1
            begin, others = 2 * head_part + 1, 2 * (head_part + 1)
        # Of a sequence that is not in the cache the first split alone writes, without a look at any key.
        last = cutlass.select_(inside, last, cutlass.select_(first == 0, cutlass.min(last, 1), first))
        splits = cutlass.select_(inside, splits, Int32(1))
        source, place, row, queries = self.queries(g, batch)
        if self.ragged:  # the first tile also of none
            last = cutlass.select_(task % g.tiles * ROWS < cutlass.max(queries * g.group, 1), last, first)
        return Segment(batch, task // g.tiles, task % g.tiles, first_key + first, first_key + last,
                       cutlass.select_(inside, length, Int32(0)), inside, split, splits, begin, others, number, stop,
                       stop == start + weight, source, place, row, queries)

    def planned(self, g, s):
        """Is the length, of a tile of ragged queries up to its last one, the one that was planned for?"""
        length = g.seqlens[s.source]
        if not self.ragged:
            return s.length == length
        first, end = g.cu[s.source], g.cu[s.source + 1]
        fine = (length >= 0) & (length <= g.capacity) & (s.row >= first) & (s.row + s.queries <= end) & (
            s.length == cutlass.max(length - (end - s.row - s.queries), 0))
        return fine | (s.queries == 0)

    def queries(self, g, batch):
        """(row of the table, where in q, first query, how many) of a sequence of the plan: none where the list has what
        the call has not."""
        if not self.ragged:
            return batch, batch, Int32(0), g.queries
        at = words.listed(g.batch, g.heads_kv, g.tiles) + words.LISTED * batch
        source, row, queries = (g.plan[at + i] for i in range(words.LISTED))
        fine = (source >= 0) & (source < g.seqlens.shape[0]) & (row >= 0) & (queries >= 0) & (
            queries <= g.queries) & (row <= g.q.shape[1] - queries)
        return [cutlass.select_(fine, x, Int32(0)) for x in (source, Int32(0), row, queries)]

    def most_splits(self, g):
        """Slots of each task, with fixed splits: as many as the cache's capacity asks for."""
        return g.partial.shape[0] // (g.batch * g.heads_kv * g.tiles)

    def slot(self, g, s, split):
        """Where a split's partial result lies. Splits beyond the cache, of a length that is none, share the last."""
        if self.fixed:
            return s.begin + cutlass.min(split, self.most_splits(g) - 1)
        return cutlass.select_(split == 0, s.begin, s.others + (split - 1) * self.STEP)

    @cute.jit
    def advance(self, g, at, s: Segment):
        """To the place behind the segment."""
        at[X] = s.position
        if s.last:
            at[TASK] = at[TASK] + 1
            if at[TASK] == g.heads_kv * g.tiles:
                at[TASK] = Int32(0)
                at[BATCH] = at[BATCH] + 1
                if at[BATCH] < g.batch:
                    prefix = words.prefix(g.batch) + at[BATCH]
                    at[LENGTH], at[PREFIX] = g.plan[words.LENGTHS + at[BATCH]], g.plan[prefix]
                    at[WEIGHT] = (g.plan[prefix + 1] - at[PREFIX]) // (g.heads_kv * g.tiles)
