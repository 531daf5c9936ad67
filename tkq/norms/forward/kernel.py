"""The one-pass norms as they are compiled: a RowNorm, of the parts that a spec and its config have."""
from typing import Optional

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from ..config import waits_together
from . import arguments
from .fp8_output import Fp8Output
from .layernorm import LayerNorm
from .layernorm_multi_row import LayerNormMultiRow
from .rmsnorm import RMSNorm
from .row_norm import Operands, Output, RowNorm


class PlainNorm:
    """Of a spec without options."""

    def __init__(self, spec, config):
        self.norm = _row_norm(spec, config)

    def fake_arguments(self):
        """Compiled for x, weight, bias, out, eps; None where the spec has none of it."""
        return arguments.plain(self.norm.spec)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: Optional[cute.Tensor], mB: Optional[cute.Tensor], mO: cute.Tensor,
                 eps: Float32, stream: cuda.CUstream):
        self.norm.launch(Operands(mX, mW, mB, mO), eps, None, stream)


class NormWithOptions:
    """Of any spec."""

    def __init__(self, spec, config):
        self.norm = _row_norm(spec, config)

    def fake_arguments(self):
        """Compiled for all of `Operands`, eps and the weight's offset; None where the spec has none of it."""
        return arguments.with_options(self.norm.spec)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mW: Optional[cute.Tensor], mB: Optional[cute.Tensor], mO: cute.Tensor,
                 mR: Optional[cute.Tensor], mT: Optional[cute.Tensor], mRstd: Optional[cute.Tensor],
                 mMean: Optional[cute.Tensor], mScale: Optional[cute.Tensor], eps: Float32, offset: Optional[Float32],
                 stream: cuda.CUstream):
        self.norm.launch(Operands(mX, mW, mB, mO, mR, mT, mRstd, mMean, mScale), eps, offset, stream)


def norm_of(spec, config):
    """The class of a RowNorm's norm."""
    if spec.kind == "rmsnorm":
        return RMSNorm
    return LayerNormMultiRow if waits_together(spec, config) else LayerNorm


def output_of(spec):
    """The class of a RowNorm's output."""
    return Output if spec.scale is None else Fp8Output


def _row_norm(spec, config):
    return RowNorm(spec, config, norm_of(spec, config)(), output_of(spec)())
