"""How the state goes from run to run, in the order of the tokens."""
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

import tkq.tile as tk
from tkq.recurrence.config import WARP


class Run(NamedTuple):
    """Tokens of a warp's columns or lines: k of the block's `runs`, of all its lines; of its warp `warp`, at `lane`."""

    k: Any
    runs: Any
    warp: Any
    lane: Any


class WarpCarry:
    """The state is carried from warp to warp: a chained scan inside a block. Warp w has the runs w, w + warps,
    w + 2 warps, ..: all loads of a run are in flight while the warps before compute, so as many runs are in flight as
    there are warps. What a run does to the state is its kernel's: `ColumnScan` takes the steps of one thread that goes
    from token to token, bit for bit.

    Warp w waits at its own named barrier, 1 + w, at which the warp before it arrives once it has written the state to
    w's slot. Deadlock-free: a run waits for the one before it alone, and a warp takes its runs in order. A slot is
    written again `warps` runs later, by a warp that took the state after the slot had been read."""

    def __init__(self, vector, warps):
        self.vector, self.warps = vector, warps

    def slots(self):
        """Shared memory for a state of each lane of each warp; None where one warp has all runs."""
        return tk.SharedAllocator().vector(self.warps * WARP * self.vector, dtype=Float32) if self.warps > 1 else None

    @cute.jit
    def take(self, state: cute.Tensor, slots, run):
        """state = what the run before has left. The first run has it already."""
        if const_expr(self.warps > 1):
            if run.k > 0:
                tk.sync(1 + run.warp, 2 * WARP)
                for e in cutlass.range_constexpr(self.vector):
                    state[e] = slots[(run.warp * self.vector + e) * WARP + run.lane, 0]

    @cute.jit
    def pass_on(self, state: cute.Tensor, slots, run):
        """The state to the next run, if there is one."""
        if const_expr(self.warps > 1):
            if run.k + 1 < run.runs:
                next_ = cutlass.select_(run.warp + 1 < self.warps, run.warp + 1, 0)
                for e in cutlass.range_constexpr(self.vector):
                    slots[(next_ * self.vector + e) * WARP + run.lane, 0] = state[e]
                tk.sync_arrive(1 + next_, 2 * WARP)
