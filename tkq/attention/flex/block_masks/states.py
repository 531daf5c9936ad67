"""Which blocks of a mask are full, which are partly seen: without the mask in memory, and but for few blocks without a
look at their elements."""
from collections.abc import Callable
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int8, Int32, Int64

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div
from tkq.attention.flex.block_masks.bounds import Kinds, over_block
from tkq.attention.flex.block_masks.elements import Elements
from tkq.attention.flex.block_masks.parts import Parts, Range, place_of
from tkq.attention.flex.emit import select
from tkq.attention.flex.fakes import captured, states
from tkq.attention.flex.operands import Captured, MaskSizes
from tkq.attention.flex.spec import StatesSpec

NONE, SOME, ALL = 0, 1, 2  # what of a block is seen
KINDS = Kinds(Int64, Boolean, lambda n: Int64(place_of(Float32(n))))


class BlockStates:
    """states[b, h, i, j] = 0 where nothing of a block is seen, 2 where all of it is, else 1. What is behind the end is
    not seen.

    A warp has ``run`` blocks of a row of blocks. Of each it finds the mask's bounds (``bounds``), from those of what
    depends on a query or on a key alone (``Parts``), the queries' once for all. A block that they do not settle is
    looked at element by element (``Elements``). No shared memory, no barrier."""

    WARPS = 8

    def __init__(self, spec: StatesSpec):
        self.spec, self.parts, self.elements = spec, Parts(spec.mask), Elements(spec.mask)

    def fake_arguments(self):
        """Compiled for any sizes."""
        return states(), captured(self.spec.mask), MaskSizes(*(Int32(1) for _ in range(4))), Int32(1)

    @cute.jit
    def __call__(self, states: cute.Tensor, mask: Optional[Captured], sizes: MaskSizes, run: Int32,
                 stream: cuda.CUstream):
        B, H, rows, columns = states.shape
        self.kernel(states, mask, sizes, run).launch(grid=[ceil_div(columns, self.WARPS * run), rows, B * H],
                                                     block=[32 * self.WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, states: cute.Tensor, mask: Optional[Captured], sizes: MaskSizes, run: Int32):
        x, row, z = cute.arch.block_idx()
        heads, first = states.shape[1], Int32(x) * self.WARPS * run + tk.warp_id()
        self.warp(states, mask, sizes, (Int32(z // heads), Int32(z % heads), Int32(row)), (first, run))

    def warp(self, states, mask, sizes, place, columns):
        """A warp's blocks. place: batch, head, row of blocks; columns: the first block, how many, WARPS apart."""
        of, row = dict(b=(place[0], 0), h=(place[1], 0)), place[2]
        queries = self.span(row, sizes.rows, sizes.queries)
        shared = {**self.parts.alike(mask, of), **self.parts.along("q", mask, of, queries)}

        def state_of(column):
            keys = self.span(column, sizes.columns, sizes.keys)
            known = {**shared, **self.parts.along("kv", mask, of, keys)}
            seen = over_block(self.spec.mask, known, KINDS)
            inside = (queries.more + 1 == sizes.rows) & (keys.more + 1 == sizes.columns)
            return self.state(seen.low, seen.high, inside, lambda: self.elements.look(mask, of, queries, keys))

        self.each(states[(*place, None)], *columns, state_of)

    @staticmethod
    def span(i, size, all):
        """What the i-th block has of all queries or keys."""
        return Range(i * size, cutlass.min(size, all - i * size) - 1)

    @cute.jit
    def each(self, states: cute.Tensor, first, run, state_of: Constexpr[Callable]):
        for n in cutlass.range(run, unroll=1):
            column = first + n * self.WARPS
            if column < states.shape[0]:
                state = state_of(column)
                if tk.lane_id() == 0:
                    states[column] = Int8(state)

    @cute.jit
    def state(self, surely, possibly, inside, look: Constexpr[Callable]):
        """From bounds, or where they leave it open from what ``look`` gives: (is some seen, is all)."""
        full = select(inside, Int32(ALL), Int32(SOME))
        found = select(surely, full, Int32(NONE))
        if possibly & (surely == Boolean(False)):
            some, every = look()
            found = select(every, full, select(some, Int32(SOME), Int32(NONE)))
        return found
