"""From a spec and a config to something that can be compiled: the builders of this package's recipes."""
from cutlass import Float32, Int64

from .. import tile as tk
from ..runtime.compile import fake
from .backward import CrossEntropyBackward, Scale
from .forward import CrossEntropy, HeldRow
from .plan import StreamingConfig
from .reduce import Total
from .single_launch import CrossEntropySingleLaunch
from .streaming import StreamingRow


def build(spec, config):
    """(kernel, fake arguments): as `__call__` of CrossEntropy, CrossEntropySingleLaunch or CrossEntropyBackward has
    them."""
    rows = fake.sym()

    def matrix():
        unit = 1 if spec.shifted else spec.vector
        return fake.tensor(spec.x, (rows, spec.N), (fake.sym64(divisibility=unit), 1), align=unit * spec.width // 8)

    logits, target = matrix(), _vector(spec.target, rows)
    weight = None if spec.weight is None else _vector(spec.weight, spec.N)
    loss = fake.tensor("fp32", (rows,), (fake.sym64(),), align=4) if spec.reduction == "none" else fake.scalar("fp32")
    saved = _vector("fp32", fake.sym()) if spec.keep else None, _vector("fp32", 2) if spec.part else None
    if spec.once:
        saved = saved[0], fake.tensor("int32", (fake.sym(),), (1,), align=16)
    gradient = None if spec.kind == "forward" else matrix()
    numbers = (Int64(0), Float32(0), Float32(0), Float32(0))
    return _kernel(spec, config), (logits, target, weight, loss, *saved, gradient, *numbers)


def _kernel(spec, config):
    if spec.kind == "backward":
        return CrossEntropyBackward(spec, config)
    row = (StreamingRow if isinstance(config, StreamingConfig) else HeldRow)(spec, config)
    return (CrossEntropySingleLaunch if spec.once else CrossEntropy)(spec, row)


def total(spec, config):
    """(kernel, fake arguments): losses, targets, class weights, loss (), 1 / the weights' sum (2,), ignore_index."""
    rows = fake.sym()
    losses = _vector("fp32", rows) if spec.losses else None
    target = _vector(spec.target, rows) if spec.mean else None
    weight = _vector(spec.weight, fake.sym()) if spec.mean and spec.weight else None
    return Total(spec, config), (losses, target, weight, fake.scalar("fp32") if spec.losses else None,
                                 _vector("fp32", 2) if spec.mean else None, Int64(0))


def scale(spec, config):
    """(kernel, fake arguments): x (M, N) with any row stride, the factor ()."""
    stride = (fake.sym64(divisibility=spec.vector), 1)
    x = fake.tensor(spec.x, (fake.sym(), spec.N), stride, align=spec.vector * spec.width // 8)
    return Scale(spec, config), (x, fake.scalar("fp32"))


def _vector(dtype, size):
    return fake.tensor(dtype, (size,), (1,), align=tk.element_type(dtype).width // 8)
