"""How a flex kernel's producer finds a task's key tiles, on a CPU."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32

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
