"""Which task a number means: a tile of a sequence's packed queries, and the keys of a cache that it may see."""
from dataclasses import dataclass, replace
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

import tkq.tile as tk
from tkq.attention.common.tile_order import heads_in_l2_section, tile_of_task
from tkq.attention.decode import words
from tkq.attention.decode.chunked.state import Results, Sizes
from tkq.attention.decode.output import tell
from tkq.attention.forward.tile_scheduler import Task


@dataclass(frozen=True)
class Tasks:
    """A task's ``batch`` is the row of q behind its sequence's last, ``batch_k`` the sequence. Of ragged queries a tile
    that the plan lists is a sequence by itself, of the keys that its last query sees.

    A sequence that says something wrong, and one that is not as it was planned, has no keys and a fault, which makes
    its results NaN; the plan's flags say so."""

    seqlens: cute.Tensor
    table: Optional[cute.Tensor]
    cu: Optional[cute.Tensor]
    results: Results
    sizes: Sizes
    key_bytes: Constexpr[int]  # of a key and its value
    l2_section_bytes: Constexpr[int]
    longest_first: Constexpr[bool]

    @property
    def heads_per_kv(self):
        return self.sizes.heads_per_kv

    @property
    def ragged(self):
        return self.cu is not None

    def matches(self):
        """Was the plan made for such a call?"""
        sizes, same = self.sizes, cutlass.Boolean(True)
        given = {words.MAGIC: Int32(words.NUMBER), words.BATCH: sizes.batch, words.HEADS_KV: sizes.heads_kv,
                 words.GROUP: sizes.group, words.QUERIES: sizes.planned, words.KEY_BLOCK: Int32(sizes.key_block),
                 words.FIXED: Int32(0), words.LEFT: sizes.left, words.PARTS: sizes.parts}
        for place, number in given.items():
            same = same & (self.results.plan[place] == number)
        return same

    def begin(self, schedule):
        """(what ``find`` is asked of, the schedule: of a plan of another call without tasks)"""
        return self, replace(schedule, tasks=cutlass.select_(self.matches(), schedule.tasks, Int32(0)))

    def lengths(self, task):
        """(rows_q, rows_k) of a task, as a consumer has it."""
        return task["rows_q"], task["rows_k"]

    def find(self, number):
        """(the task of a number, Int32: is what it says of itself wrong?)"""
        task, fine = (self.listed if self.ragged else self.of_sequence)(number)
        tell(self.results.plan, fine, tk.lane_id())
        return (task._replace(rows_k=cutlass.select_(fine, task.rows_k, Int32(0))),
                cutlass.select_(fine, Int32(0), Int32(1)))

    def of_sequence(self, number):
        sizes, plan = self.sizes, self.results.plan
        each = sizes.heads * sizes.tiles
        b = number // each
        length, planned = self.seqlens[b], plan[words.LENGTHS + b]
        fine = (length >= 0) & (length <= sizes.capacity) & (length == planned)
        kv_bytes = cutlass.max(cutlass.min(length, Int32(1 << 20)), 1) * self.key_bytes
        section = heads_in_l2_section(kv_bytes, self.l2_section_bytes, sizes.heads_per_kv, sizes.heads)
        head, tile = tile_of_task(number - b * each, sizes.tiles, sizes.heads, section, self.longest_first)
        return Task((b + 1) * sizes.rows, b, head, tile, sizes.rows, length), fine

    def listed(self, number):
        """Head by head, a sequence's last tiles, which see the most keys, before its first ones."""
        sizes, plan = self.sizes, self.results.plan
        head = number // sizes.batch
        i = sizes.batch - 1 - (number - head * sizes.batch)
        at = words.listed(sizes.batch, sizes.heads_kv, sizes.planned_tiles) + words.LISTED * i
        source, row, queries = (plan[at + j] for j in range(words.LISTED))
        there = (source >= 0) & (source < self.seqlens.shape[0]) & (row >= 0) & (queries >= 0) & (
            queries <= sizes.planned) & (row <= sizes.rows - queries)
        source, row, queries = (cutlass.select_(there, x, Int32(0)) for x in (source, row, queries))
        length, planned = self.seqlens[source], plan[words.LENGTHS + i]
        first, end = self.cu[source], self.cu[source + 1]
        fine = (length >= 0) & (length <= sizes.capacity) & (row >= first) & (row + queries <= end) & (
            planned == cutlass.max(length - (end - row - queries), 0))
        fine = (fine | (queries == 0)) & (planned >= 0) & (planned <= sizes.capacity)
        return Task(row + queries, source, head, Int32(0), queries, planned), fine

    def unseen(self, t: Task, seen, block, windows):
        """Ranges of keys that lie in the blocks of ``block`` keys of the sequence's other tasks. windows: are keys
        limited on the left?"""
        behind = (seen.first + seen.blocks) * block, t.rows_k
        if not windows:
            return (behind,)
        begin = cutlass.max(t.rows_k - t.rows_q - self.sizes.left, 0) // block * block
        return (begin, seen.first * block), behind
