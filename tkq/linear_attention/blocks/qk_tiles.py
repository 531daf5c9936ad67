"""Tokens of a chunk as they lie in shared memory: 16 of them and 64 columns at a time, keys and queries by turns, so
that the state meets both of a block as one operand of 32 rows."""
import cutlass.cute as cute
from cutlass import Constexpr

import tkq.tile as tk
from tkq.linear_attention.blocks.pairs import EDGE, PANEL
from tkq.linear_attention.config import CHUNK

KEYS, QUERIES = 0, 1
BLOCKS = CHUNK // EDGE  # of a chunk


class QkTiles:
    """A ring of tiles of 16 x 64: of each stage those of each block, of each 64 columns, of keys and of queries."""

    def __init__(self, columns: Constexpr[int], dtype):
        self.type, self.dtype, self.panels = tk.st(EDGE, PANEL, dtype), dtype, columns // PANEL
        self.bytes = 2 * self.panels * BLOCKS * self.type.bytes  # of a stage

    def ring(self, al: tk.SharedAllocator, stages: int) -> tk.SharedTile:
        """Room for it."""
        return al.tile(self.type, 2 * self.panels * BLOCKS * stages)

    def at(self, stage, block, panel, which):
        """Which tile of the ring."""
        return ((stage * BLOCKS + block) * self.panels + panel) * 2 + which

    def both(self, ring: tk.SharedTile, stage, block, panel) -> tk.SharedTile:
        """A block's keys and, below them, its queries."""
        return ring.stacked(2)[(stage * BLOCKS + block) * self.panels + panel]

    def keys(self, ring: tk.SharedTile, stage, block, panel) -> tk.SharedTile:
        """A block's."""
        return ring[self.at(stage, block, panel, KEYS)]

    def queries(self, ring: tk.SharedTile, stage, block, panel) -> tk.SharedTile:
        """A block's."""
        return ring[self.at(stage, block, panel, QUERIES)]

    def rows(self, ring: tk.SharedTile, stage, which):
        """All of a chunk's, as `pairs.products` takes them."""
        size, stages = self.type.rows * self.type.cols, ring.stages // (2 * self.panels * BLOCKS)
        of_block = 2 * self.panels * size
        layout = cute.make_layout(((8, 2, BLOCKS), PANEL, (2, self.panels, stages)),
                                  stride=((PANEL, 8 * PANEL, of_block), 1, (size, 2 * size, BLOCKS * of_block)))
        staged, type = cute.make_tensor(ring.staged.iterator, layout), tk.st(CHUNK, PANEL, self.dtype)
        return lambda panel: tk.SharedTile(staged, type, (which, panel, stage))
