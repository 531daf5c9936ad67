"""How flex kernels find a task's tiles, on a CPU."""
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32

from tkq.attention.backward.config import BackwardConfig
from tkq.attention.backward.state import Task
from tkq.attention.flex.backward.scheduler import FlexScheduler
from tkq.attention.flex.backward.spec import FlexBackwardSpec
from tkq.attention.flex.operands import BlockLists
from tkq.attention.flex.state import KeyTiles
from tkq.runtime.compile import fake


class KeyTilesOnCpu:
    """found (B, H, tiles of rows, n): of each task the tiles of its visit; the one that a task of none loads."""

    def __init__(self, full: bool, q_per: int, kv_per: int):
        self.full, self.q_per, self.kv_per = full, q_per, kv_per

    def fake_arguments(self):
        ints = lambda *shape: fake.tensor("int32", shape, align=4)
        B, H, R = (fake.sym() for _ in range(3))
        full = (ints(B, H, R), ints(B, H, R, fake.sym())) if self.full else (None, None)
        lists = BlockLists(ints(B, H, R), ints(B, H, R, fake.sym()), *full)
        return ints(*(fake.sym() for _ in range(4))), lists, Int32(1)

    @cute.jit
    def __call__(self, found: cute.Tensor, lists: BlockLists, tiles: Int32):
        keys = KeyTiles(lists, True, self.full, self.q_per, self.kv_per, tiles)
        for b in cutlass.range(found.shape[0]):
            for h in cutlass.range(found.shape[1]):
                for t in cutlass.range(found.shape[2]):
                    of = Int32(b), Int32(h), Int32(t)
                    counts = keys.counts(*of)
                    for i in cutlass.range(cutlass.max(counts.all, 1)):
                        found[b, h, t, i] = keys.at(*of, Int32(i), counts)


@dataclass(frozen=True)
class Visited:
    """What ``FlexScheduler`` looks at of its globals."""

    queries: KeyTiles
    heads_per_kv: Int32


class SchedulerOnCpu(FlexScheduler):
    """A step after the other, where there are no warps."""

    @cute.jit
    def steps(self, tile_at: Constexpr, first, end, step: Constexpr, asks: Constexpr[bool]):
        for i in cutlass.range(first, end):
            step(tile_at(i))


class VisitOnCpu(KeyTilesOnCpu):
    """A block of keys in the backward. found (2, n): its tiles of queries as the producer loads them, and as warpgroups
    with keys are told; told (1,): how many these are, 0 before. score: a graph whose scores depend on their place."""

    def __init__(self, score, mask, full: bool, kv_per: int):
        super().__init__(full, 1, kv_per)
        self.spec = FlexBackwardSpec(score=score, mask=mask, blocks=True, full=full)
        self.scheduler = SchedulerOnCpu(self.spec, BackwardConfig())

    def fake_arguments(self):
        return fake.tensor("int32", (2, fake.sym()), align=4), fake.tensor("int32", (1,), align=4), *(
            super().fake_arguments()[1:])

    @cute.jit
    def __call__(self, found: cute.Tensor, told: cute.Tensor, lists: BlockLists, tiles: Int32):
        keys = KeyTiles(lists, self.spec.mask is not None, self.full, self.q_per, self.kv_per, tiles)
        g, t = Visited(keys, Int32(1)), Task(*[Int32(0)] * 12)

        def load(i, h, tile):
            found[0, i] = tile

        def step(g, s, t, c, m, masked):
            s[1, c[0]] = m[1]
            c[0] = c[0] + 1

        self.scheduler.each_tile(g, t, load)
        self.scheduler.visit_head(g, found, t, told, Int32(0), step)
