"""How a flex kernel's roles find a task's key tiles, on a CPU: `KeyTiles` for each of them."""
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tkq.attention.flex.operands import BlockLists
from tkq.attention.flex.state import KeyTiles
from tkq.runtime.compile import fake


class KeyTilesOnCpu:
    """found (2, B, H, tiles of rows, n): of each task the tiles of its visit by `at`, and by `from_start`."""

    def __init__(self, full: bool, q_per: int, kv_per: int):
        self.full, self.q_per, self.kv_per = full, q_per, kv_per

    def fake_arguments(self):
        ints = lambda *shape: fake.tensor("int32", shape, align=4)
        B, H, R = (fake.sym() for _ in range(3))
        full = (ints(B, H, R), ints(B, H, R, fake.sym())) if self.full else (None, None)
        lists = BlockLists(ints(B, H, R), ints(B, H, R, fake.sym()), *full)
        return ints(*(fake.sym() for _ in range(5))), lists, Int32(1)

    @cute.jit
    def __call__(self, found: cute.Tensor, lists: BlockLists, tiles: Int32):
        keys = KeyTiles(lists, True, self.full, self.q_per, self.kv_per, tiles)
        starts = cute.make_rmem_tensor((2,), Int64)
        for b in cutlass.range(found.shape[1]):
            for h in cutlass.range(found.shape[2]):
                for t in cutlass.range(found.shape[3]):
                    of = Int32(b), Int32(h), Int32(t)
                    counts = keys.counts(*of)
                    for n, start in enumerate(keys.starts(*of)):
                        starts[n] = start
                    for i in cutlass.range(counts.all):
                        found[0, b, h, t, i] = keys.at(*of, Int32(i), counts.masked)
                        tile = keys.from_start(starts, Int32(i), counts.masked, False)
                        if i < counts.masked:
                            tile = keys.from_start(starts, Int32(i), counts.masked, True)
                        found[1, b, h, t, i] = tile
