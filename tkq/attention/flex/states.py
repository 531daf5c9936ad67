"""Which blocks of a mask are full, which are partly seen: counted without the mask in memory."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32
from cutlass.cute.runtime import make_fake_tensor

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div
from tkq.attention.flex.emit import Emitted
from tkq.attention.flex.fakes import captured
from tkq.attention.flex.operands import Captured, MaskSizes
from tkq.attention.flex.spec import StatesSpec
from tkq.runtime.compile import fake


class BlockStates:
    """states[b, h, i, j] = 0 where nothing of a block is seen, 2 where all of it is, else 1. What is behind the end is
    not seen.

    A warp has one block: a lane each 32nd column, row by row, so that what depends on columns is made once. No shared
    memory, no barrier."""

    WARPS = 8

    def __init__(self, spec: StatesSpec):
        self.spec = spec

    def fake_arguments(self):
        """Compiled for any sizes."""
        states = make_fake_tensor(Int8, tuple(fake.sym() for _ in range(4)), tuple(fake.sym64() for _ in range(4)),
                                  memspace=cutlass.AddressSpace.gmem, assumed_align=1)
        return states, captured(self.spec.mask), MaskSizes(*(Int32(1) for _ in range(4)))

    @cute.jit
    def __call__(self, states: cute.Tensor, mask: Optional[Captured], sizes: MaskSizes, stream: cuda.CUstream):
        B, H, rows, columns = states.shape
        self.kernel(states, mask, sizes).launch(grid=[ceil_div(columns, self.WARPS), rows, B * H],
                                                block=[32 * self.WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, states: cute.Tensor, mask: Optional[Captured], sizes: MaskSizes):
        x, row, z = cute.arch.block_idx()
        column, heads = x * self.WARPS + tk.warp_id(), states.shape[1]
        if column < states.shape[3]:
            some, every = self.look(mask, sizes, (Int32(z // heads), Int32(z % heads)), (Int32(row), Int32(column)))
            some, every = cute.arch.vote_any_sync(some), cute.arch.vote_all_sync(every)
            if tk.lane_id() == 0:
                found = cutlass.select_(every, Int32(2), cutlass.select_(some, Int32(1), Int32(0)))
                states[z // heads, z % heads, row, column] = Int8(found)

    @cute.jit
    def look(self, mask: Optional[Captured], sizes: MaskSizes, of, block):
        """(is some of the lane's part of a block seen, is all of it)"""
        row0, column0 = block[0] * sizes.rows, block[1] * sizes.columns
        some, every = Boolean(False), Boolean(True)
        inside = cutlass.min(sizes.rows, sizes.queries - row0)
        if inside < sizes.rows:
            every = Boolean(False)
        for j in cutlass.range(tk.lane_id(), sizes.columns, 32, unroll=1):
            for i in cutlass.range(inside, unroll=4):
                graph = Emitted(self.spec.mask, mask)
                kv = column0 + j
                seen = graph.at(b=(of[0], 0), h=(of[1], 0), q=(row0 + i, 0), kv=(kv, 0)) & (kv < sizes.keys)
                some, every = some | seen, every & seen
        return some, every
