"""From a spec and a config to something that can be compiled: the builder of this package's recipes."""
from cutlass import Float32

from ..runtime.compile import fake
from .backward import SoftmaxBackward
from .forward import Softmax


def build(spec, config):
    """(kernel, fake arguments): x and out, or y, dy and dx, (M, N) with any row stride; and scale."""
    rows = fake.sym()

    def matrix():
        unit = 1 if spec.shifted else spec.vector
        return fake.tensor(spec.x, (rows, spec.N), (fake.sym64(divisibility=unit), 1), align=unit * spec.width // 8)

    if spec.backward:
        return SoftmaxBackward(spec, config), (matrix(), matrix(), matrix(), Float32(0))
    return Softmax(spec, config), (matrix(), matrix(), Float32(0))
