"""Which blocks of a mask are full, which are partly seen: without the mask in memory, and but for few blocks without a
look at their elements."""
from collections.abc import Callable
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int8, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div
from tkq.attention.flex.bounds import Kinds, over_block
from tkq.attention.flex.elements import Elements
from tkq.attention.flex.emit import select
from tkq.attention.flex.fakes import captured
from tkq.attention.flex.operands import Captured, MaskSizes
from tkq.attention.flex.parts import Parts, Range
from tkq.attention.flex.spec import StatesSpec
from tkq.runtime.compile import fake

NONE, SOME, ALL = 0, 1, 2  # what of a block is seen


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
        states = make_fake_tensor(Int8, tuple(fake.sym() for _ in range(4)), tuple(fake.sym64() for _ in range(4)),
                                  memspace=cutlass.AddressSpace.gmem, assumed_align=1)
        return states, captured(self.spec.mask), MaskSizes(*(Int32(1) for _ in range(4))), Int32(1)

    @cute.jit
    def __call__(self, states: cute.Tensor, mask: Optional[Captured], sizes: MaskSizes, run: Int32,
                 stream: cuda.CUstream):
        B, H, rows, columns = states.shape
        self.kernel(states, mask, sizes, run).launch(grid=[ceil_div(columns, self.WARPS * run), rows, B * H],
                                                     block=[32 * self.WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, states: cute.Tensor, mask: Optional[Captured], sizes: MaskSizes, run: Int32):
        x, row, z = cute.arch.block_idx()
        heads = states.shape[1]
        of, row = dict(b=(Int32(z // heads), 0), h=(Int32(z % heads), 0)), Int32(row)
        queries = Range(row * sizes.rows, cutlass.min(sizes.rows, sizes.queries - row * sizes.rows) - 1)
        shared = {**self.parts.alike(mask, of), **self.parts.along("q", mask, of, queries)}

        def state_of(column):
            first = column * sizes.columns
            keys = Range(first, cutlass.min(sizes.columns, sizes.keys - first) - 1)
            known = {**shared, **self.parts.along("kv", mask, of, keys)}
            seen = over_block(self.spec.mask, known, Kinds(Int64, Boolean))
            inside = (queries.more + 1 == sizes.rows) & (keys.more + 1 == sizes.columns)
            return self.state(seen.low, seen.high, inside, lambda: self.elements.look(mask, of, queries, keys))

        self.each(states[z // heads, z % heads, row, None], Int32(x) * self.WARPS * run + tk.warp_id(), run, state_of)

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
