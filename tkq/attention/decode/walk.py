"""Which keys of which tasks a block of threads takes: the same loop for producers and consumers."""
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tkq.attention.decode import words
from tkq.attention.decode.planner import blocks_of


class Segment(NamedTuple):
    """Blocks first .. end of keys of a task: sequence ``batch``, K/V head ``head``, ``tile`` of packed queries.

    length: of the sequence, 0 where it is not valid. valid: is it? split: the segment's number among the task's
    ``splits``. slot: of its partial result; others: of the task's second split (their slots are ``step`` apart), begin:
    of its first. task: the number of its counter. position: where the work behind it begins. last: does the task end
    with it?"""

    batch: Int32
    head: Int32
    tile: Int32
    first: Int32
    end: Int32
    length: Int32
    valid: cutlass.Boolean
    split: Int32
    splits: Int32
    begin: Int32
    others: Int32
    task: Int32
    position: Int32
    last: cutlass.Boolean


class Walk:
    """The part of the plan's work that a block has, task by task. Every thread of a role calls it, with the same
    result."""

    STEP = 2  # slots from a task's second split to its third: each part has two slots, for its first and its last task

    def __init__(self, spec):
        self.fixed = spec.fixed_splits

    @cute.jit
    def begin(self, g):
        """(first position, position behind the last, sequence, task of the sequence) of this block's part."""
        me = cute.arch.block_idx()[0]
        start = g.plan[words.STARTS + me]
        x = Int32(0)
        end = Int32(0)
        batch = Int32(0)
        task = Int32(0)
        if self.matches(g):
            part, total = g.plan[words.PART], g.plan[words.TOTAL]
            x = cutlass.min(me * part, total)
            end = cutlass.min(x + part, total)
            if x < end:
                batch = start
                task = (x - self.prefix(g, batch)) // self.weight(g, batch)
        return x, end, batch, task

    def matches(self, g):
        """Was the plan made for such a call? Also by all blocks of threads that there are."""
        given = {words.MAGIC: Int32(words.NUMBER), words.BATCH: g.batch, words.HEADS_KV: g.heads_kv,
                 words.GROUP: g.group, words.QUERIES: g.queries, words.KEY_BLOCK: Int32(g.key_block),
                 words.FIXED: g.split, words.LEFT: g.left, words.PARTS: Int32(cute.arch.grid_dim()[0])}
        same = cutlass.Boolean(True)
        for place, number in given.items():
            same = same & (g.plan[place] == number)
        return same

    def prefix(self, g, batch):
        return g.plan[words.prefix(g.batch) + batch]

    def weight(self, g, batch):
        """Positions of each of a sequence's tasks."""
        return (self.prefix(g, batch + 1) - self.prefix(g, batch)) // (g.heads_kv * g.tiles)

    def segment(self, g, x, end, batch, task) -> Segment:
        """From position x on, inside of the part's end."""
        length = g.plan[words.LENGTHS + batch]
        valid = (length >= 0) & (length <= g.capacity) & (length == g.seqlens[batch])
        weight = self.weight(g, batch)
        start = self.prefix(g, batch) + task * weight
        first_key, end_key = blocks_of(length, g.queries, g.left, g.key_block)
        blocks = cutlass.max(end_key - first_key, 1)
        stop = cutlass.min(start + weight, end)
        if self.fixed:
            first = (x - start) * g.split
            last = cutlass.min(first + g.split, blocks)
            stop = x + 1
            split, splits = x - start, weight
            begin = ((batch * g.heads_kv + task // g.tiles) * g.tiles + task % g.tiles) * self.most_splits(g)
            others = begin + 1
        else:
            overhead, part = g.plan[words.OVERHEAD], g.plan[words.PART]
            first = cutlass.max(x - start - overhead, 0)
            last = cutlass.min(stop - start - overhead, blocks)
            me, head_part = cute.arch.block_idx()[0], (start + overhead) // part
            split, splits = me - head_part, (start + weight - 1) // part - head_part + 1
            begin, others = 2 * head_part + 1, 2 * (head_part + 1)
        tile, head = task % g.tiles, task // g.tiles
        # Of a sequence that is not valid the first split alone writes, without a look at any key.
        last = cutlass.select_(valid, last, cutlass.select_(first == 0, cutlass.min(last, 1), first))
        splits = cutlass.select_(valid, splits, Int32(1))
        return Segment(batch, head, tile, first_key + first, first_key + last, cutlass.select_(valid, length, Int32(0)),
                       valid, split, splits, begin, others, (batch * g.heads_kv + head) * g.tiles + tile, stop,
                       stop == start + weight)

    def most_splits(self, g):
        """Slots of each task, with fixed splits: as many as the cache's capacity asks for."""
        return g.partial.shape[0] // (g.batch * g.heads_kv * g.tiles)

    def slot(self, g, s, split):
        """Where a split's partial result lies. Splits beyond the cache, of a length that is none, share the last."""
        if self.fixed:
            return s.begin + cutlass.min(split, self.most_splits(g) - 1)
        return cutlass.select_(split == 0, s.begin, s.others + (split - 1) * self.STEP)

    def after(self, g, s: Segment, task):
        """(sequence, task of the sequence) behind the segment."""
        task = cutlass.select_(s.last, task + 1, task)
        over = task == g.heads_kv * g.tiles
        return cutlass.select_(over, s.batch + 1, s.batch), cutlass.select_(over, Int32(0), task)
