"""kv_append and merge_state on a CPU: their own `thread`, called for one thread after the other. And how the blocks
of a launch walk through a plan."""
from dataclasses import dataclass
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32

from tests.helpers.emulation import finish
from tkq.attention.decode import append, balancer, lister, merge, planner, tree, walk, words
from tkq.runtime.compile import fake
from tkq.tile import vectors

function = finish.function


class MergeStateOnCpu(merge.MergeState):
    @cute.jit
    def __call__(self, o_a: cute.Tensor, operands: merge.Operands):
        B, S, H, D = o_a.shape
        for unit in cutlass.range(B * S * H * (D // self.vector) + 1):
            self.thread(Int32(unit), o_a, operands)

    def columns(self, partial, place, there):
        held = vectors.load(vectors.run_at(partial, place, merge.NARROW))
        return [cutlass.select_(there, held[e], Float32(0.0)) for e in range(merge.NARROW)]


class KvAppendOnCpu(append.KvAppend):
    @cute.jit
    def __call__(self, k: cute.Tensor, operands: append.Operands):
        for unit in cutlass.range(k.shape[0] * self.units(k, operands) + 1):
            self.thread(Int32(unit), k, operands)


class ListerOnCpu(lister.Lister):
    @cute.jit
    def __call__(self, cu: cute.Tensor, others: tuple, listing: lister.Listing):
        seqlens, lengths, plan = others
        for tile in cutlass.range(listing.tiles + 1):
            self.thread(Int32(tile), (cu, seqlens, lengths, plan), listing)


class BalancerOnCpu(balancer.Balancer):
    """plan: what the kernel writes of sequences, whose lengths are there, and of parts; its size and what all come to
    as the first two words. blocks: of each sequence, to be written."""

    def fake_arguments(self):
        ints = lambda: fake.tensor("int32", (fake.sym(),), align=4)
        return fake.tensor("int32", (fake.sym(), 1), align=4), ints(), planner.Sizes(*[Int32(1)] * 11)

    @cute.jit
    def __call__(self, blocks: cute.Tensor, plan: cute.Tensor, sizes: planner.Sizes):
        batch, total, longest = Int32(blocks.shape[0]), Int32(0), Int32(0)
        for b in cutlass.range(batch):
            length = self.planner.length(plan[words.LENGTHS + b], sizes)
            plan[words.LENGTHS + b], blocks[b, 0] = length, self.planner.blocks(length, sizes)
            total, longest = total + blocks[b, 0], cutlass.max(longest, blocks[b, 0])
        least, size, spill = Int32(balancer.NEVER), Int32(0), Int32(0)
        for thread in cutlass.range(self.THREADS):
            one = self.candidate(Int32(thread), (total, longest, batch), sizes)
            cost, own = self.cost(blocks, one, batch, sizes)
            if cost < least:
                least, size, spill = cost, own, Int32(one.spill)
        plan[0] = size
        for thread in cutlass.range(self.THREADS):
            plan[1] = self.write(plan, blocks, balancer.Candidate(size, spill != 0), (batch, Int32(thread)), sizes)


@dataclass(frozen=True)
class Seen:
    """What a walk looks at."""

    plan: cute.Tensor
    seqlens: cute.Tensor
    partial: cute.Tensor
    batch: Int32
    heads_kv: Int32
    group: Int32
    queries: Int32
    tiles: Int32
    capacity: Int32
    left: Int32
    split: Int32
    key_block: Constexpr[int]


class WalkOnCpu:
    """found (parts, n, 8): sequence, task of it, first and last block, split, splits, slot and whether it is valid, of
    each segment of each part; count (parts,): how many. numbers: as in `planner.Sizes`, capacity in the place of
    overhead."""

    def __init__(self, fixed):
        self.walk = walk.Walk(SimpleNamespace(fixed_splits=fixed, ragged=False))

    def fake_arguments(self):
        ints = lambda *shape: fake.tensor("int32", shape, align=4)
        return ints(fake.sym()), (ints(fake.sym()), fake.tensor("fp32", (fake.sym(), 1, 1), align=4), ints(fake.sym()),
                                  ints(fake.sym(), fake.sym(), 8)), planner.Sizes(*[Int32(1)] * 11)

    @cute.jit
    def __call__(self, plan, others, sizes: planner.Sizes):
        seqlens, partial, count, found = others
        g = Seen(plan, seqlens, partial, Int32(seqlens.shape[0]), sizes.heads_kv, sizes.group, sizes.queries,
                 sizes.tiles, sizes.overhead, sizes.left, sizes.split, 128)
        for part in cutlass.range(sizes.parts):
            self.part(Int32(part), g, count, found)

    @cute.jit
    def part(self, part, g, count, found):
        here.append(part)
        at = self.walk.begin(g)
        n = Int32(0)
        while at[walk.X] < at[walk.END]:
            s = self.walk.segment(g, at)
            if s.first < s.end:
                of = (s.batch, at[walk.TASK], s.first, s.end, s.split, s.splits, self.walk.slot(g, s, s.split),
                      Int32(s.inside))
                for i in cutlass.range_constexpr(8):
                    found[part, n, i] = of[i]
                n += 1
            self.walk.advance(g, at, s)
        count[part] = n


here = []  # the part that is traced


def walk_function(fixed, parts, monkeypatch):
    """The compiled walk of all parts."""
    with monkeypatch.context() as patched:
        patched.setattr(cute.arch, "block_idx", lambda: (here[-1], 0, 0))
        patched.setattr(cute.arch, "grid_dim", lambda: (Int32(parts), 1, 1))
        return finish.function(WalkOnCpu(fixed), patched)


class TreeBitsOnCpu:
    """`TreeMask.bits` of each mask and start."""

    def fake_arguments(self):
        of = lambda dtype, align: fake.tensor(dtype, (fake.sym(),), align=align)
        return of("int64", 8), (of("int32", 4), of("int32", 4))

    @cute.jit
    def __call__(self, masks: cute.Tensor, others: tuple):
        starts, found = others
        for i in cutlass.range(masks.shape[0], unroll=1):
            found[i] = tree.TreeMask(None, None).bits(masks[i], starts[i])
