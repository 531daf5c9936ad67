"""Lists of a mask's blocks, from what each block is."""
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int8, Int32
from cutlass.cute.runtime import make_fake_tensor

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div
from tkq.attention.flex.fakes import ints
from tkq.attention.flex.operands import BlockLists
from tkq.runtime.compile import fake


class OrderBlocks:
    """Of each row of states (B, H, rows, columns): how many are 1, and which, in order, then those that are not; the
    same of 2. A warp has a row. No shared memory, no barrier."""

    WARPS = 8

    def fake_arguments(self):
        """Compiled for any sizes and strides."""
        states = make_fake_tensor(Int8, tuple(fake.sym() for _ in range(4)), tuple(fake.sym64() for _ in range(4)),
                                  memspace=cutlass.AddressSpace.gmem, assumed_align=1)
        num, indices = (lambda: ints(*(fake.sym() for _ in range(3)))), lambda: ints(*(fake.sym() for _ in range(4)))
        return states, BlockLists(num(), indices(), num(), indices())

    @cute.jit
    def __call__(self, states: cute.Tensor, lists: BlockLists, stream: cuda.CUstream):
        B, H, rows, _ = states.shape
        self.kernel(states, lists).launch(grid=[ceil_div(rows, self.WARPS), H, B], block=[32 * self.WARPS, 1, 1],
                                          stream=stream)

    @cute.kernel
    def kernel(self, states: cute.Tensor, lists: BlockLists):
        x, head, batch = cute.arch.block_idx()
        row = x * self.WARPS + tk.warp_id()
        if row < states.shape[2]:
            self.order(states[batch, head, row, None], (batch, head, row), lists.num, lists.indices, 1)
            self.order(states[batch, head, row, None], (batch, head, row), lists.full_num, lists.full_indices, 2)

    @cute.jit
    def order(self, states: cute.Tensor, place, num: cute.Tensor, indices: cute.Tensor, wanted: cutlass.Constexpr):
        lane, columns, total, before = tk.lane_id(), states.shape[0], Int32(0), Int32(0)
        below = (Int32(1) << lane) - 1
        for base in cutlass.range(0, columns, 32, unroll=1):
            total = total + cute.arch.popc(cute.arch.vote_ballot_sync(self.here(states, base + lane, wanted)))
        if lane == 0:
            num[place] = total
        for base in cutlass.range(0, columns, 32, unroll=1):
            column = base + lane
            here = self.here(states, column, wanted)
            bits = cute.arch.vote_ballot_sync(here)
            rank = before + cute.arch.popc(bits & below)
            before = before + cute.arch.popc(bits)
            if column < columns:
                indices[(*place, cutlass.select_(here, rank, total + column - rank))] = column

    def here(self, states, column, wanted):
        """Inside, and wanted?"""
        last = states.shape[0] - 1
        return (column <= last) & (Int32(states[cutlass.min(column, last)]) == wanted)
