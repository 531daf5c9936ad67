"""From the spec of a call of a ReductionBase to the kernel and its fake arguments: the builder of its recipes."""
import importlib
import inspect

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..runtime.compile import fake
from ..tile import element_type
from .spec import Argument, ReductionSpec, is_stream


def build(spec: ReductionSpec):
    """(kernel, fake arguments) of a spec."""
    cls = importlib.import_module(spec.module)
    for name in spec.qualname.split("."):
        cls = getattr(cls, name)
    rows = fake.sym()

    def argument(a: Argument):
        if a.kind in ("none", "float", "int"):
            return {"none": None, "float": Float32(0), "int": Int32(0)}[a.kind]
        align = a.vector * element_type(a.dtype).width // 8
        if a.kind == "matrix":
            return fake.tensor(a.dtype, (rows, spec.N), (fake.sym64(divisibility=a.vector), 1), align=align)
        return fake.tensor(a.dtype, (spec.N,) if a.kind == "columns" else (rows,), (1,), align=align)

    kernel = cls(element_type(spec.arguments[0].dtype), spec.N, **dict(spec.options))
    return kernel, _with_stream(cls, [argument(a) for a in spec.arguments])


def _with_stream(cls, arguments) -> tuple:
    """The arguments of `__call__`, torch's current stream among them: a caller of the compiled kernel leaves it out."""
    for i, p in enumerate(list(inspect.signature(cls.__call__).parameters.values())[1:]):
        if is_stream(p):
            arguments.insert(i, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))
            break
    return tuple(arguments)
