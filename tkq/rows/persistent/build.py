"""From the spec and plan of a RowKernel's call to the kernel and its fake arguments: the builder of its recipes."""
import importlib

from cutlass import Float32, Int32

from ...runtime.compile import fake
from .shape import RowPlan
from .spec import RowSpec


def build(spec: RowSpec, p: RowPlan):
    """(kernel, fake arguments) of a spec and a plan."""
    cls = importlib.import_module(spec.module)
    for name in spec.qualname.split("."):
        cls = getattr(cls, name)
    rows, units = fake.sym(), fake.sym()

    def matrix(s, bytes_):
        stride = (fake.sym64(divisibility=8 * bytes_ // s.width), 1)
        return fake.tensor(s.dtype, (rows, spec.N), stride, align=bytes_)

    def some(made):
        return tuple(made) or None

    first, *others = (matrix(s, 16 if spec.bulk else spec.vector * s.width // 8) for s in spec.loads)
    arguments = (
        first, some(others),
        some(matrix(s, spec.vector * s.width // 8) for s in spec.stores),
        some(fake.tensor(s.dtype, (spec.N,), (1,), align=s.align) for s in spec.vectors),
        some(fake.tensor("fp32", (rows,), (1,), align=4) for _ in spec.scalars),
        some(fake.tensor("fp32", (rows,), (1,), align=4) for _ in spec.results),
        some(fake.tensor(s.dtype, (spec.N,), (1,), align=16) for s in spec.columns),
        fake.tensor("fp32", (len(spec.columns), units, p.pitch)) if spec.columns else None,
        fake.tensor("int32", (1,), align=4) if spec.columns else None,
        some(Float32(0) for _ in cls.parameters),
        Int32(0))
    return cls(spec, p), arguments
