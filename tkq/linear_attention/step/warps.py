"""Sums over the warps of a block that share a slice of V, each with rows of K of its own."""
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32

import tkq.tile as tk
from tkq.linear_attention.step.config import LANES, StepConfig
from tkq.tile import vectors

DOTS = 4  # room for the sums that a warp has one of


class WarpSums:
    """Each warp puts its own sums into shared memory, all meet once, and each adds up those of all, in one order: they
    are the same in all warps. `runs` are of the slice's columns, a lane's neighbours; `dots` are the same in all lanes.
    """

    def __init__(self, config: StepConfig, runs: int):
        self.config, self.runs = config, runs

    def memory(self):
        """Of the block: a row of numbers for each warp."""
        return tk.SharedAllocator().vector(self.runs * self.config.columns + DOTS, self.config.k_warps)

    def total(self, memory, part, runs: list, dots: list):
        """(runs, dots) of all warps. Every thread of the block calls it, once."""
        warp = tk.warp_id()  # here, where all lanes are: they shuffle for it
        for i, values in enumerate(runs):
            self.put(part.first_along_k, values, self.run(memory, warp, part, i))
        self.put(part.lane == 0, dots, self.dots(memory, warp))
        tk.sync_block()
        runs, dots = [[Float32(0.0)] * len(run) for run in runs], [Float32(0.0)] * len(dots)
        for w in range(self.config.k_warps):
            for i, run in enumerate(runs):
                runs[i] = _plus(run, self.run(memory, w, part, i))
            dots = _plus(dots, self.dots(memory, w))
        return runs, dots

    def run(self, memory, warp, part, i):
        return vectors.run_at(memory, (i * self.config.columns + part.in_slice, warp), self.config.v_values)

    def dots(self, memory, warp):
        return vectors.run_at(memory, (self.runs * self.config.columns, warp), DOTS)

    @cute.jit
    def put(self, mine, values: Constexpr[list], to):
        """to = values, by the lanes whose they are."""
        if mine:
            held = cute.make_rmem_tensor(cute.size(to), Float32)
            for i in cutlass.range_constexpr(cute.size(to)):
                held[i] = values[i] if i < len(values) else Float32(0.0)
            cute.autovec_copy(held, to)


def _plus(totals, more):
    held = cute.make_rmem_tensor(cute.size(more), Float32)
    cute.autovec_copy(more, held)
    return [total + held[i] for i, total in enumerate(totals)]


def first_row(config: StepConfig):
    """Of K, the first that this warp has. It is computed for each lane: with `tk.warp_id`, of which it is known that
    all lanes have the same, q and k would go to uniform registers, which are waited for before v and gates are asked
    for."""
    return cute.arch.thread_idx()[0] // LANES * config.rows
