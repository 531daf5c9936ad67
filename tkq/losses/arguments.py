"""What the kernels of cross entropy are compiled for."""
from cutlass import Float32, Int64

from .. import tile as tk
from ..rows.one_pass.arguments import matrix
from ..runtime.compile import fake


def of_rows(spec):
    """As `__call__` of CrossEntropy, CrossEntropySingleLaunch and CrossEntropyBackward has them."""
    rows = fake.sym()
    logits, target = matrix(spec, rows), vector(spec.target, rows)
    weight = None if spec.weight is None else vector(spec.weight, spec.N)
    loss = fake.tensor("fp32", (rows,), (fake.sym64(),), align=4) if spec.reduction == "none" else fake.scalar("fp32")
    saved = vector("fp32", fake.sym()) if spec.save else None, vector("fp32", 2) if spec.part else None
    if spec.once:
        saved = saved[0], fake.tensor("int32", (fake.sym(),), (1,), align=16)
    gradient = None if spec.kind == "forward" else matrix(spec, rows)
    return logits, target, weight, loss, *saved, gradient, Int64(0), Float32(0), Float32(0), Float32(0)


def vector(dtype, size):
    """A fake tensor (size,)."""
    return fake.tensor(dtype, (size,), (1,), align=tk.element_type(dtype).width // 8)
