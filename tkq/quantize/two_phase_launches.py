"""Float8 with one scale for all of x, or with scales for rows and for columns: x is read twice, in one call."""
from dataclasses import replace
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32

from .row_col_scales import RowColScales
from .spec import TileSpec
from .tiles import THREADS, Tilewise, operands


class SeparateLaunches:
    """Three launches, each of which needs all of the one before:

      clear       zeros to amax
      "amax"      x to amax
      "quantise"  x and amax to q, scale, qt, scale_t

    The last two are of `Tiles` or `Lines`.
    """

    def __init__(self, spec: TileSpec):
        kernel, columns_too = (RowColScales, spec.transpose) if spec.granularity == "row" else (Tilewise, False)
        self.find, self.write = kernel(replace(spec, step="amax", transpose=columns_too)), kernel(spec)

    @cute.jit
    def __call__(self, x: cute.Tensor, q: cute.Tensor, scale: cute.Tensor, qt: Optional[cute.Tensor],
                 scale_t: Optional[cute.Tensor], amax: cute.Tensor, stream: cuda.CUstream):
        blocks = cute.ceil_div(amax.shape[0], THREADS)
        self.clear(amax).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)
        self.find(x, None, None, None, None, amax, stream)
        self.write(x, q, scale, qt, scale_t, amax, stream)

    @cute.kernel
    def clear(self, amax: cute.Tensor):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < amax.shape[0]:
            amax[i] = Int32(0)


def build(spec: TileSpec):
    """(kernel, fake arguments)."""
    return SeparateLaunches(spec), operands(spec)
