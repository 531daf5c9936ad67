"""The kernel that plans latent attention's decoding from the lengths as they are on the GPU: see `decode.balance`."""
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

import tkq.tile as tk
from tkq.attention.decode import words
from tkq.attention.decode.balance import CANDIDATES, EACH, LEAST_ROOM, MERGE, MOST_BLOCKS, PARTIAL, PARTIAL_ROWS, ROOM
from tkq.attention.decode.plan import ROWS
from tkq.attention.decode.planner import Planner, Sizes

BASE, USED, PARTIALS, FILL = range(4)  # of `balance.Place`
NEVER = (1 << 31) - 1  # what a candidate costs whose parts are too few


class Candidate(NamedTuple):
    size: Int32
    spill: Boolean


class Shared(NamedTuple):
    """blocks: of each sequence. warps: a number of each. chosen: the size, and whether it goes with spill."""

    blocks: cute.Tensor
    warps: cute.Tensor
    chosen: cute.Tensor


class Balancer:
    """One block of threads. Each thread places all sequences by a candidate of its own; the cheapest one is agreed on,
    and all place the sequences by it once more, of which each thread writes down its share."""

    THREADS = CANDIDATES

    def __init__(self):
        self.planner = Planner()

    def fake_arguments(self):
        return self.planner.fake_arguments()

    @cute.jit
    def __call__(self, seqlens: cute.Tensor, plan: cute.Tensor, sizes: Sizes, stream: cuda.CUstream):
        self.kernel(seqlens, plan, sizes).launch(grid=[1, 1, 1], block=[self.THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, seqlens: cute.Tensor, plan: cute.Tensor, sizes: Sizes):
        al = tk.SharedAllocator()
        smem = Shared(al.vector(ROOM, 1, Int32), al.vector(self.THREADS // 32, 1, Int32), al.vector(2, 1, Int32))
        thread, batch = cute.arch.thread_idx()[0], seqlens.shape[0]
        total, longest, bad = Int32(0), Int32(0), Int32(0)
        for b in cutlass.range(thread, batch, self.THREADS, unroll=1):
            length = self.planner.length(seqlens[b], sizes)
            blocks = self.planner.blocks(length, sizes)
            plan[words.LENGTHS + b], smem.blocks[b, 0] = length, blocks
            bad = cutlass.select_(length < 0, Int32(1), bad)
            total, longest = total + blocks, cutlass.max(longest, blocks)
        total, longest = self.agree(smem, total, "add"), self.agree(smem, longest, "max")
        one = self.candidate(thread, (total, longest, Int32(batch)), sizes)
        cost, size = self.cost(smem.blocks, one, Int32(batch), sizes)
        least = self.agree(smem, cost, "min")
        first = self.agree(smem, cutlass.select_(cost == least, Int32(thread), Int32(self.THREADS)), "min")
        chosen = smem.chosen
        if thread == first:
            chosen[0, 0], chosen[1, 0] = size, Int32(one.spill)
        tk.sync_block()
        one = Candidate(chosen[0, 0], chosen[1, 0] != 0)
        end = self.write(plan, smem.blocks, one, (Int32(batch), thread), sizes)
        used = (end + one.size - 1) // one.size * words.RECORD
        for i in cutlass.range(used + thread, words.MOST_PARTS * words.RECORD, self.THREADS, unroll=1):
            plan[words.STARTS + i] = Int32(0)
        for b in cutlass.range(thread, batch, self.THREADS, unroll=1):
            plan[words.counters(batch) + b] = Int32(0)
        flagged = cute.arch.vote_any_sync(bad != 0)
        self.planner.header(plan, sizes._replace(overhead=Int32(0)), (batch, end, one.size), (thread, flagged))

    @cute.jit
    def agree(self, smem, number, kind: cutlass.Constexpr):
        """The sum, the largest or the smallest one of all threads' numbers."""
        warps, number, warp = smem.warps, cute.arch.warp_redux_sync(number, kind), tk.warp_id()  # which all lanes ask
        if tk.lane_id() == 0:
            warps[warp, 0] = number
        tk.sync_block()
        found = warps[0, 0]
        for w in cutlass.range_constexpr(1, self.THREADS // 32):
            one = warps[w, 0]
            found = found + one if const_expr(kind == "add") else (
                cutlass.max if const_expr(kind == "max") else cutlass.min)(found, one)
        tk.sync_block()
        return found

    def candidate(self, number, known, sizes) -> Candidate:
        """known: blocks of all sequences, of the longest one, and how many sequences there are."""
        total, longest, batch = known
        kind, n, mean = number // EACH, number % EACH, (total + sizes.parts - 1) // sizes.parts
        size = cutlass.select_(kind == 0, mean + n, (longest + n) // (n + 1))
        size = cutlass.select_(kind == 1, mean + longest * n // EACH, size)
        safe = (total + batch * sizes.overhead) // sizes.parts + (sizes.overhead + LEAST_ROOM + 1)
        many = total > MOST_BLOCKS
        return Candidate(cutlass.select_(many, safe, size), many | (kind % 2 == 0))

    @cute.jit
    def put(self, at, blocks, one: Candidate, begin):
        """As `balance.put`: where the sequence begins."""
        used = at[USED] + cutlass.select_(at[USED] > 0, begin, Int32(0))
        cut = one.spill & (used + LEAST_ROOM <= one.size)
        if (used + blocks > one.size) & (used > 0) & (cut == Boolean(False)):
            at[BASE] = at[BASE] + one.size
            used = Int32(0)
        start = at[BASE] + used
        end = used + blocks
        if end > one.size:
            behind = (end - 1) // one.size
            at[BASE] = at[BASE] + behind * one.size
            at[PARTIALS] = at[PARTIALS] + behind + 1
            at[FILL] = one.size
            end = end - behind * one.size
        at[USED] = end
        at[FILL] = cutlass.max(at[FILL], end)
        return start

    def place(self):
        at = cute.make_rmem_tensor((4,), Int32)
        at.fill(0)
        return at

    @cute.jit
    def cost(self, blocks, one: Candidate, batch, sizes):
        """(in blocks, of all parts together; the size). It ends where the parts do: no number of blocks overflows."""
        at, b, room = self.place(), Int32(0), sizes.parts * one.size
        while (b < batch) & (at[BASE] <= room):
            self.put(at, blocks[b, 0], one, sizes.overhead)
            b += 1
        size = cutlass.select_(at[PARTIALS] > 0, one.size, at[FILL])
        rows = cutlass.min(sizes.queries * sizes.group, ROWS)
        merging = MERGE * sizes.parts + at[PARTIALS] * (PARTIAL + rows // PARTIAL_ROWS)
        cost = size * sizes.parts + cutlass.select_(at[PARTIALS] > 0, merging, Int32(0))
        return cutlass.select_((b == batch) & (at[BASE] + at[USED] <= room), cost, Int32(NEVER)), size

    @cute.jit
    def write(self, plan, blocks, one: Candidate, place, sizes):
        """Where each sequence begins, and of each part the sequence in which it begins; where all ends."""
        (batch, thread), at, before = place, self.place(), Int32(0)
        for b in cutlass.range(batch, unroll=1):
            start = self.put(at, blocks[b, 0], one, sizes.overhead)
            if (b > 0) & ((b - 1) % self.THREADS == thread):
                self.note(plan, (batch, b - 1), (before, start), one)
            before = start
        end = at[BASE] + at[USED]
        if (batch - 1) % self.THREADS == thread:
            self.note(plan, (batch, batch - 1), (before, end), one)
        return end

    @cute.jit
    def note(self, plan, of, span, one: Candidate):
        """A sequence: from its first block up to where the next one begins."""
        (batch, b), (start, end), size = of, span, one.size
        plan[words.prefix(batch) + b] = start
        record = b, plan[words.LENGTHS + b], start, end - start
        for p in cutlass.range((start + size - 1) // size, (end + size - 1) // size, unroll=1):
            for i in cutlass.range_constexpr(words.RECORD):
                plan[words.STARTS + words.RECORD * p + i] = Int32(record[i])
