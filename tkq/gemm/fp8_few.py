"""The float8 GEMM of a few rows, small enough for two blocks on a processor."""
from .fp8 import Fp8Gemm, operands
from .fp8_config import Fp8Config
from .fp8_rolling import RollingFp8Gemm
from .fp8_spec import Fp8Spec


class _Twice:
    """A kernel's launch, for two blocks on a processor: half of its registers and shared memory each."""

    def __init__(self, made):
        self.made = made

    def launch(self, **how):
        return self.made.launch(**{**how, "min_blocks_per_mp": 2, "preferred_smem_carveout": 100})


class FewRows(Fp8Gemm):
    """As Fp8Gemm: the next launch's block comes to a processor while this one's still reads, and begins at once."""

    def kernel(self, g):
        return _Twice(super().kernel(g))


class RollingFewRows(RollingFp8Gemm):
    """As FewRows."""

    def kernel(self, g):
        return _Twice(super().kernel(g))


def build(spec: Fp8Spec, config: Fp8Config):
    """As ``fp8.build``."""
    from cutlass import Int32, Int64

    scales = (Int64(1), Int64(1), Int64(1))
    kernel = RollingFewRows if config.rolling else FewRows
    return kernel(spec, config), (*operands(spec), scales, scales, Int64(1), Int64(1), Int32(1))
