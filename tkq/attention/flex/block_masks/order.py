"""Lists of a mask's blocks, from what each block is."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

import tkq.tile as tk
from tkq.attention.common.integers import ceil_div
from tkq.attention.flex.fakes import ints, states
from tkq.attention.flex.operands import BlockLists
from tkq.runtime.compile import fake


class OrderBlocks:
    """Of each row of states (B, H, rows, columns): how many are 1, and which, in order, then those that are not; the
    same of 2. both: of each column, too, in the same launch. A warp has a row or a column. No shared memory, no
    barrier."""

    WARPS, LANES = 8, 32  # of a block, of a warp
    GROUP = 8  # states that a lane loads at a time

    def __init__(self, both: bool = False):
        self.both = both

    def fake_arguments(self):
        """Compiled for any sizes and strides."""
        num, indices = (lambda: ints(*(fake.sym() for _ in range(3)))), lambda: ints(*(fake.sym() for _ in range(4)))
        lists = lambda: BlockLists(num(), indices(), num(), indices())
        return states(), lists(), lists() if self.both else None

    @cute.jit
    def __call__(self, states: cute.Tensor, lists: BlockLists, others: Optional[BlockLists], stream: cuda.CUstream):
        """others: of the columns, where they are made, too."""
        B, H, rows, columns = states.shape
        blocks = ceil_div(rows, self.WARPS)
        if const_expr(self.both):
            blocks = blocks + ceil_div(columns, self.WARPS)
        self.kernel(states, lists, others).launch(grid=[blocks, H, B], block=[32 * self.WARPS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, states: cute.Tensor, lists: BlockLists, others: Optional[BlockLists]):
        x, head, batch = cute.arch.block_idx()
        of_rows, line = ceil_div(states.shape[2], self.WARPS), x * self.WARPS + tk.warp_id()
        if x < of_rows:
            self.line(states, lists, (batch, head, line))
        if const_expr(self.both):
            if x >= of_rows:
                self.line(self.turned(states), others, (batch, head, line - of_rows * self.WARPS))

    def turned(self, states):
        """Its columns as rows."""
        return cute.make_tensor(states.iterator, cute.select(states.layout, [0, 1, 3, 2]))

    @cute.jit
    def line(self, states: cute.Tensor, lists: BlockLists, place):
        if place[2] < states.shape[2]:
            self.order(states[(*place, None)], lists, place)

    @cute.jit
    def order(self, states: cute.Tensor, lists: BlockLists, place):
        lane, columns = tk.lane_id(), states.shape[0]
        below = (Int32(1) << lane) - 1
        some, full, some_before, full_before = Int32(0), Int32(0), Int32(0), Int32(0)
        for base in cutlass.range(0, columns, self.LANES * self.GROUP, unroll=1):
            for state in self.group(states, base + lane):
                some = some + cute.arch.popc(cute.arch.vote_ballot_sync(state == 1))
                full = full + cute.arch.popc(cute.arch.vote_ballot_sync(state == 2))
        if lane == 0:
            lists.num[place], lists.full_num[place] = some, full
        indices, full_indices = lists.indices[(*place, None)], lists.full_indices[(*place, None)]
        for base in cutlass.range(0, columns, self.LANES * self.GROUP, unroll=1):
            for n, state in enumerate(self.group(states, base + lane)):
                column = base + lane + self.LANES * n
                bits, full_bits = cute.arch.vote_ballot_sync(state == 1), cute.arch.vote_ballot_sync(state == 2)
                rank = some_before + cute.arch.popc(bits & below)
                full_rank = full_before + cute.arch.popc(full_bits & below)
                some_before, full_before = some_before + cute.arch.popc(bits), full_before + cute.arch.popc(full_bits)
                if column < columns:
                    indices[cutlass.select_(state == 1, rank, some + column - rank)] = column
                    full_indices[cutlass.select_(state == 2, full_rank, full + column - full_rank)] = column

    def group(self, states, first):
        """States of which a lane has each 32nd, loaded together; 0 behind the end."""
        last, found = states.shape[0] - 1, []
        for n in range(self.GROUP):
            found.append(Int32(states[cutlass.min(first + self.LANES * n, last)]))
        return [cutlass.select_(first + self.LANES * n <= last, state, Int32(0)) for n, state in enumerate(found)]
