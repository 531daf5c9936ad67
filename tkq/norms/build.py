"""From a spec and a config to something that can be compiled: the builder of this package's recipes."""
from cutlass import Float32

from .. import tile as tk
from ..runtime import fake
from .layernorm import LayerNorm
from .rmsnorm import RMSNorm

_KERNELS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def build(spec, config):
    """(kernel, fake arguments): x and out (M, N) with any row stride, weight and bias (N,) or None, eps."""
    rows = fake.sym()

    def matrix():
        stride = (fake.sym64(divisibility=spec.vector), 1)
        return fake.tensor(spec.x, (rows, spec.N), stride, align=spec.vector * spec.width // 8)

    def vector(dtype):
        if dtype is None:
            return None
        return fake.tensor(dtype, (spec.N,), (1,), align=min(16, spec.vector * tk.element_type(dtype).width // 8))

    return _KERNELS[spec.kind](spec, config), (matrix(), vector(spec.weight), vector(spec.bias), matrix(), Float32(0))
