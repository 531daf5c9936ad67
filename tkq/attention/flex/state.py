"""What the roles of the kernel see beside what attention's forward has: block lists and captured values."""
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div
from tkq.attention.flex.operands import BlockLists, Captured


class Counts(NamedTuple):
    """Of a task's key tiles: those that need the mask, which come first, and all."""

    masked: Any
    all: Any


@dataclass(frozen=True)
class KeyTiles:
    """Which tiles of keys a task visits: those of its listed blocks, or all there are.

    Whatever the lists say, no number leads outside of them, and no block lies behind the keys' last one."""

    lists: Optional[BlockLists]
    masked: Constexpr[bool]  # without lists: do all need the mask?
    full: Constexpr[bool]
    q_per: Constexpr[int]  # tiles of rows in a block
    kv_per: Constexpr[int]  # tiles of keys in a block
    tiles: Int32  # of all keys

    def row_block(self, tile):
        return cutlass.min(tile // self.q_per, self.lists.num.shape[2] - 1)

    def counts(self, batch, head, tile) -> Counts:
        if self.lists is None:
            return Counts(self.tiles if self.masked else Int32(0), self.tiles)
        of = batch, head, self.row_block(tile)
        listed = lambda num, indices: cutlass.max(cutlass.min(num[of], indices.shape[3]), 0) * self.kv_per
        masked = listed(self.lists.num, self.lists.indices)
        if not self.full:
            return Counts(masked, masked)
        return Counts(masked, masked + listed(self.lists.full_num, self.lists.full_indices))

    def starts(self, batch, head, tile):
        """Where a task's lists begin, of blocks that need the mask and of those that do not: elements from the
        tensors' first. Found once for all of its tiles."""
        if self.lists is None:
            return ()
        of = batch, head, self.row_block(tile), 0
        return tuple(Int64(cute.crd2idx(of, x.layout)) for x in (self.lists.indices, self.lists.full_indices)[
            :1 + self.full])

    def from_start(self, starts, i, masked, needed: bool):
        """As ``at``, of a tile that is known to need the mask, or not to, where there is one. starts: in registers."""
        if self.lists is None:
            return i
        entry, which = i // self.kv_per, int(self.full and not needed)
        if which:
            entry = entry - masked // self.kv_per
        x = (self.lists.indices, self.lists.full_indices)[which]
        place = x.iterator + (starts[which] + cutlass.max(cutlass.min(entry, x.shape[3] - 1), 0))
        block = cute.make_tensor(place, cute.make_layout(1))[0]
        return self.tile_of(block, i)

    def tile_of(self, block, i):
        """A listed block's tile, of which i says the place in it: of none behind the last."""
        last = ceil_div(self.tiles, self.kv_per) - 1
        return cutlass.max(cutlass.min(block, last), 0) * self.kv_per + i % self.kv_per

    @cute.jit
    def at(self, batch, head, tile, i, counts: Counts):
        """The i-th tile of keys of a task's visit; of one past either end, some tile. Listed ones come from the last to
        the first, as in ``flash_attn``: those on the diagonal, of which most rows see a key, begin. It is loaded: what
        needs it should come late."""
        found = i
        if const_expr(self.lists is not None):
            of, lists, rest = (batch, head, self.row_block(tile)), self.lists, counts.masked - 1 - i
            block = lists.indices[(*of, self.entry(rest, lists.indices))]
            if const_expr(self.full):
                if i >= counts.masked:
                    rest = counts.all - 1 - i
                    block = lists.full_indices[(*of, self.entry(rest, lists.full_indices))]
            # of no tiles at all rest is -1, whose remainder would lead in front of the first one
            found = self.tile_of(block, cutlass.max(rest, 0))
        return found

    def entry(self, i, indices):
        """Of a list, where the block is that has the i-th of its tiles."""
        return cutlass.max(cutlass.min(i // self.kv_per, indices.shape[3] - 1), 0)


@dataclass(frozen=True)
class FlexGlobals:
    """As ``forward.state.Globals``, for the parts that both kernels have."""

    q: tk.gl
    k: tk.gl
    v: tk.gl
    o: Any  # as there
    lse: Optional[cute.Tensor]
    sinks: Optional[cute.Tensor]  # None
    tasks: Any
    schedule: tk.Schedule
    scale: Float32  # of what the exponentials take, times log2(e)
    score_scale: Float32  # of Q @ K.T, where a score function follows
    keys: KeyTiles
    score: Optional[Captured]
    mask: Optional[Captured]
