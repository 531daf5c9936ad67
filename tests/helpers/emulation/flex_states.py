"""The kernels that find out what a mask's blocks are, and make lists of them, on a CPU: their own code, for one warp
after the other.

What differs from the GPU: a warp has one lane, so that nothing is exchanged."""
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

import tkq.tile as tk
from tests.helpers.emulation import host
from tkq.attention.flex import fakes
from tkq.attention.flex.block_masks.order import OrderBlocks
from tkq.attention.flex.block_masks.parts import Parts
from tkq.attention.flex.block_masks.states import BlockStates


class BlockStatesOnCpu(BlockStates):
    @cute.jit
    def __call__(self, states, mask, sizes, run: Int32):
        B, H, rows, columns = states.shape
        for b in cutlass.range(B):
            for h in cutlass.range(H):
                for row in cutlass.range(rows):
                    for first in cutlass.range(columns):
                        if first % (self.WARPS * run) < self.WARPS:
                            self.warp(states, mask, sizes, (Int32(b), Int32(h), Int32(row)), (Int32(first), run))


class OrderBlocksOnCpu(OrderBlocks):
    @cute.jit
    def __call__(self, states, lists, others):
        B, H, rows, columns = states.shape
        for b in cutlass.range(B):
            for h in cutlass.range(H):
                for row in cutlass.range(rows):
                    self.line(states, lists, (Int32(b), Int32(h), Int32(row)))
                for column in cutlass.range(columns):
                    self.line(self.turned(states), others, (Int32(b), Int32(h), Int32(column)))


def function(kernel, monkeypatch):
    """The compiled kernel; takes tensors of the CPU."""
    with monkeypatch.context() as patched:
        patched.setattr(Parts, "LANES", 1)
        patched.setattr(OrderBlocks, "LANES", 1)
        patched.setattr(tk, "lane_id", lambda: Int32(0))
        patched.setattr(fakes, "AddressSpace", SimpleNamespace(gmem=cutlass.AddressSpace.generic))
        for name in ("vote_any_sync", "vote_all_sync"):
            patched.setattr(cute.arch, name, lambda x: x)
        patched.setattr(cute.arch, "warp_redux_sync", lambda x, kind: x)
        patched.setattr(cute.arch, "vote_ballot_sync", lambda x: cutlass.select_(x, Int32(1), Int32(0)))
        patched.setattr(cute.arch, "popc", lambda x: x)
        patched.setattr(cute.arch, "shuffle_sync", lambda x, lane: x)
        return host.compiled(kernel, kernel.fake_arguments())
