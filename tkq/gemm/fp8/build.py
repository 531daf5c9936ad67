"""From a spec and a configuration to a kernel of ``fp8_gemm`` and its fake arguments: the builder of its recipes."""
from cutlass import Int32, Int64

from .config import Fp8Config
from .kernel import Fp8Gemm, operands
from .overlapped_epilogue import OverlappedEpilogueFp8Gemm, OverlappedPipelinedFp8Gemm
from .pipelined_promotion import PipelinedPromotionFp8Gemm
from .spec import Fp8Spec


def form(config: Fp8Config) -> type:
    """The kernel that takes such a configuration."""
    forms = (Fp8Gemm, PipelinedPromotionFp8Gemm), (OverlappedEpilogueFp8Gemm, OverlappedPipelinedFp8Gemm)
    return forms[config.overlap_epilogue > 0][config.promotion_unroll > 0]


def build(spec: Fp8Spec, config: Fp8Config):
    """(kernel, fake arguments): a, b, c; (address, stride, stride) of each operand's scales; the addresses of bias and
    out_scale, 0 where there is none; how many blocks to launch."""
    scales = (Int64(1), Int64(1), Int64(1))
    return form(config)(spec, config), (*operands(spec), scales, scales, Int64(1), Int64(1), Int32(1))
