"""The float8 GEMM with wave sync, for many waves of long tiles."""
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..wave_sync import WaveSync
from . import kernel as fp8
from .config import WaveSyncFp8Config
from .overlapped_epilogue import OverlappedEpilogueFp8Gemm
from .pipelined_promotion import PipelinedPromotionFp8Gemm
from .spec import Fp8Spec
from .state import Globals


@dataclass(frozen=True)
class WaveSyncGlobals(Globals):
    counter: Int64  # its address


class WaveSyncFp8(WaveSync):
    """In front of an Fp8Gemm: its producer waits for the other blocks' once in each wave, see ``WaveSync``. The counter
    is an argument of its own."""

    addressing = 56, 224
    bias_ahead = False  # no registers for it, with 192 columns

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, scale_a: tuple, scale_b: tuple, bias: Int64,
                 out_scale: Int64, blocks: Int32, counter: Int64, stream: cuda.CUstream):
        g = self.globals(a, b, c, scale_a, scale_b, bias, out_scale)
        self.launch(WaveSyncGlobals(**vars(g), counter=counter), blocks, stream)

    def order_of(self, g, s):
        return self.order(g, s)

    def tile_of(self, g, s, order, number):
        return self.tile(g, s, order, number)

    def counter(self, g):
        return g.counter


class WaveSyncFp8Gemm(WaveSyncFp8, fp8.Fp8Gemm):
    pass


class WaveSyncOverlappedFp8Gemm(WaveSyncFp8, OverlappedEpilogueFp8Gemm):
    pass


class WaveSyncPipelinedFp8Gemm(WaveSyncFp8, PipelinedPromotionFp8Gemm):
    pass


def build(spec: Fp8Spec, config: WaveSyncFp8Config):
    """(kernel, fake arguments): as ``fp8.build``, and the counter's address."""
    kernel = (WaveSyncOverlappedFp8Gemm if config.overlap_epilogue else WaveSyncPipelinedFp8Gemm
              if config.promotion_unroll else WaveSyncFp8Gemm)
    scales = (Int64(1), Int64(1), Int64(1))
    return kernel(spec, config), (*fp8.operands(spec), scales, scales, Int64(1), Int64(1), Int32(1), Int64(1))
