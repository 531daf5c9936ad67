"""Losses and their mean or sum in one launch, where rows are few: the last block to end adds them up."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr

from .. import tile as tk
from ..utils import WARP, warp_reduce
from . import arguments
from .class_rows import Options, Saved
from .forward import row_of, total_of
from .plan import TotalConfig
from .reduce import Total

HEADER = 4  # numbers of the scratch memory before its losses, which begin at 16 bytes


class CrossEntropySingleLaunch:
    """`forward.CrossEntropy` without a launch of its own for the total. row: as there.

      every block    losses of its rows -> scratch | block's barrier | thread 0: a ticket (release, acquire) | barrier
      the last one   thread i of n: losses and weights of rows i, i + n, .. | warps | one thread: loss, 1 / weights

    The order of the additions depends on the number of rows and of the block's threads alone. mScratch: int32, its
    first element the counter that tickets are drawn from, 0 before and after; from HEADER on the rows' losses, fp32.
    """

    def __init__(self, spec, config):
        self.spec, self.row = spec, row_of(spec, config)
        self.rows = self.row.rows
        self.last = Total(total_of(spec), TotalConfig(self.rows.config.threads, 1, False))

    def fake_arguments(self):
        """Compiled for what `__call__` has; None for what the spec does not have."""
        return arguments.of_rows(self.spec)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mLoss: cute.Tensor,
                 mSaved: Optional[cute.Tensor], mScratch: cute.Tensor, mD: Optional[cute.Tensor], ignore_index: Int64,
                 smoothing: Float32, z_loss: Float32, softcap: Float32, stream: cuda.CUstream):
        """As CrossEntropy has them, but mLoss: (); mScratch: at least HEADER + M."""
        tv_layout = self.rows.layout()
        o = Options(ignore_index, smoothing, z_loss, softcap)
        self.kernel(mX, mT, mW, mLoss, mSaved, mScratch, o, tv_layout).launch(
            **self.rows.launch_shape(mX.shape[0]), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mT: cute.Tensor, mW: Optional[cute.Tensor], mLoss: cute.Tensor,
               mSaved: Optional[cute.Tensor], mScratch: cute.Tensor, o: Options, tv_layout: cute.Layout):
        here, losses = self.rows.here(tv_layout), losses_of(mScratch, mX.shape[0])
        warps = const_expr(self.rows.tile.threads // WARP)
        ticket = here.smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
        parts = here.smem.allocate_tensor(Float32, cute.make_layout((2, warps)), byte_alignment=8)
        self.row.work(here, mX, mT, mW, losses, mSaved, None, None, o)
        if self._is_last(here, mScratch, ticket):
            of_mean = (mT, mW) if const_expr(self.last.spec.mean) else (None, None)
            mine = self.last.mine(losses, *of_mean, o.ignore_index, here.thread)
            self._add_up(here, mine, parts, mLoss, self.inverse_of(mSaved, mX.shape[0]))

    def inverse_of(self, mSaved, rows):
        """Where 1 / the sum of the weights goes; None where it is not needed."""
        return Saved.of(mSaved, None, rows).all if mSaved is not None and self.last.spec.mean else None

    @cute.jit
    def _is_last(self, here: Constexpr, mScratch: cute.Tensor, ticket: cute.Tensor):
        """Have all other blocks' losses been written? The same for all threads, which may read them then."""
        tiles, parts, _ = cute.arch.grid_dim()
        blocks = tiles * parts
        tk.sync_block()
        if here.thread == 0:
            ticket[0] = Int32(tk.grid_ticket(mScratch.iterator.toint(), blocks))
        tk.sync_block()
        return ticket[0] == blocks - 1

    @cute.jit
    def _add_up(self, here: Constexpr, mine: Constexpr, parts: cute.Tensor, mLoss: cute.Tensor, inverse: Constexpr):
        """By all threads of a block: their sums to one pair, warp after warp."""
        total, weight = (warp_reduce(x, lambda a, b: a + b) for x in mine)
        if tk.lane_id() == 0:
            parts[0, here.thread // WARP], parts[1, here.thread // WARP] = total, weight
        tk.sync_block()
        if here.thread == 0:
            total, weight = parts[0, 0], parts[1, 0]
            for i in cutlass.range_constexpr(1, cute.size(parts, mode=[1])):
                total, weight = total + parts[0, i], weight + parts[1, i]
            self.last.put(mLoss, inverse, total, weight)


def losses_of(scratch, rows):
    """The part of the scratch memory that is the rows' losses, (M,)."""
    return cute.make_tensor(cute.recast_ptr(scratch.iterator, dtype=Float32) + HEADER, cute.make_layout(rows))
