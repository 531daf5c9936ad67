"""The kernel that plans decoding from the lengths as they are on the GPU."""
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.runtime.compile import fake

WARP = 32


class Sizes(NamedTuple):
    """Of what is planned for: see `words`. split: blocks of a fixed split, 0: positions are blocks. left: keys before
    its own that a query sees, -1: all. most: blocks of a sequence, at most. least: positions of a part."""

    heads_kv: Int32
    group: Int32
    queries: Int32
    tiles: Int32
    key_block: Int32
    left: Int32
    split: Int32
    parts: Int32
    overhead: Int32
    least: Int32
    most: Int32


class Planner:
    """One block of threads: each sums up the work of some neighbouring sequences, the sums are added up by warp
    shuffles, and each writes where the work of its sequences begins. All counters become 0."""

    THREADS = 512

    def fake_arguments(self):
        return (fake.tensor("int32", (fake.sym(),), align=4), fake.tensor("int32", (fake.sym(),), align=4),
                Sizes(*[Int32(1)] * len(Sizes._fields)))

    @cute.jit
    def __call__(self, seqlens: cute.Tensor, plan: cute.Tensor, sizes: Sizes, stream: cuda.CUstream):
        self.kernel(seqlens, plan, sizes).launch(grid=[1, 1, 1], block=[self.THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, seqlens: cute.Tensor, plan: cute.Tensor, sizes: Sizes):
        shared = tk.SharedAllocator().vector(WARP, 1, Int32)
        thread, batch = cute.arch.thread_idx()[0], seqlens.shape[0]
        each = cute.ceil_div(batch, self.THREADS)
        mine = Int32(0)
        for i in cutlass.range(each, unroll=1):
            b = thread * each + i
            if b < batch:
                mine += self.work(self.length(seqlens[b], sizes), sizes)
        before = self.before(mine, shared, thread)
        total, bad = shared[WARP - 1, 0], Int32(0)
        part = cutlass.max((total + sizes.parts - 1) // sizes.parts, cutlass.max(sizes.least, 1))
        for i in cutlass.range(each, unroll=1):
            b = thread * each + i
            if b < batch:
                length = self.length(seqlens[b], sizes)
                bad = cutlass.select_(length < 0, Int32(1), bad)
                plan[words.LENGTHS + b] = length
                plan[words.prefix(batch) + b] = before
                behind = before + self.work(length, sizes)
                for p in cutlass.range((before + part - 1) // part, (behind + part - 1) // part, unroll=1):
                    record = b, length, before, (behind - before) // (sizes.heads_kv * sizes.tiles)
                    for i in cutlass.range_constexpr(words.RECORD):
                        plan[words.STARTS + words.RECORD * p + i] = Int32(record[i])
                before = behind
        used = (total + part - 1) // part * words.RECORD
        for i in cutlass.range(used + thread, words.MOST_PARTS * words.RECORD, self.THREADS, unroll=1):
            plan[words.STARTS + i] = Int32(0)
        flagged = cute.arch.vote_any_sync(bad != 0)
        tasks = batch * sizes.heads_kv * sizes.tiles
        for i in cutlass.range(thread, tasks, self.THREADS, unroll=1):
            plan[words.counters(batch) + i] = Int32(0)
        self.header(plan, sizes, (batch, total, part), (thread, flagged))

    def length(self, length, sizes):
        """-1 for one that cannot be."""
        # Blocks, and not keys, are compared: (length - 1) + key_block would overflow.
        blocks = (length - 1) // sizes.key_block + 1
        fine = (length >= 0) & (blocks <= sizes.most)
        return cutlass.select_(fine, length, Int32(-1))

    def blocks(self, length, sizes):
        """Blocks of keys of a sequence: at least one."""
        first, end = blocks_of(length, sizes.queries, sizes.left, sizes.key_block)
        return cutlass.max(end - first, 1)

    def work(self, length, sizes):
        """Positions of all tasks of a sequence."""
        count = self.blocks(length, sizes)
        splits = cutlass.max(sizes.split, 1)
        count = cutlass.select_(sizes.split > 0, (count + splits - 1) // splits, count + sizes.overhead)
        return count * sizes.heads_kv * sizes.tiles

    @cute.jit
    def before(self, mine, shared, thread):
        """The sum of all earlier threads' numbers. shared's last word becomes the sum of all."""
        upto, lane, warp = mine, thread % WARP, thread // WARP
        for i in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(upto, 1 << i, mask_and_clamp=0)
            upto = cutlass.select_(lane >= (1 << i), upto + below, upto)
        if lane == WARP - 1:
            shared[warp, 0] = upto
        tk.sync_block()
        total = Int32(0)
        sums = Int32(0)
        for w in cutlass.range_constexpr(self.THREADS // WARP):
            total = cutlass.select_(w < warp, total + shared[w, 0], total)
            sums += shared[w, 0]
        tk.sync_block()
        if thread == 0:
            shared[WARP - 1, 0] = sums
        tk.sync_block()
        return total + upto - mine

    @cute.jit
    def header(self, plan, sizes, known, me):
        (batch, total, part), (thread, flagged) = known, me
        if thread == 0:
            plan[words.prefix(batch) + batch] = total
            found = {words.MAGIC: Int32(words.NUMBER), words.BATCH: Int32(batch), words.HEADS_KV: sizes.heads_kv,
                     words.GROUP: sizes.group, words.QUERIES: sizes.queries, words.KEY_BLOCK: sizes.key_block,
                     words.FIXED: sizes.split, words.LEFT: sizes.left, words.PARTS: sizes.parts, words.PART: part,
                     words.TOTAL: total, words.OVERHEAD: sizes.overhead}
            for place in cutlass.range_constexpr(words.BAD_LENGTH):
                plan[place] = found[place]
            for place in cutlass.range_constexpr(words.BEYOND_CACHE, words.HEADER):
                plan[place] = Int32(0)
            plan[words.BAD_LENGTH] = Int32(0)
        tk.sync_block()
        if flagged:
            plan[words.BAD_LENGTH] = Int32(1)


def blocks_of(length, queries, left, key_block):
    """(first, end): the blocks of keys that the queries of a sequence see. Run-time ints."""
    first = cutlass.select_(left < 0, Int32(0), cutlass.max(length - queries - left, 0) // key_block)
    # length + key_block may be more than 31 bits hold; of no keys -1 // key_block is -1.
    return first, (cutlass.max(length, 0) - 1) // key_block + 1
