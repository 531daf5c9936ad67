"""What the norms' forwards are compiled for."""
from cutlass import Float32

from ... import tile as tk
from ...runtime.compile import fake
from ..spec import GROUP


def plain(spec):
    """Of a spec without options: fake x, weight, bias, out, eps; None where the spec has none of it."""
    x, w, b, out, *_, eps, _ = with_options(spec)
    return x, w, b, out, eps


def with_options(spec):
    """Fake arguments: all of `Operands`, eps and the weight's offset; None where the spec has none of it."""
    rows, heads = fake.sym(), fake.sym() if spec.heads else None

    def matrix(dtype):
        """(M, N) with any row stride."""
        return dtype and _tensor(spec, dtype, (rows, spec.N))

    def loaded(dtype):
        """The same, or (R, H, N) with any two strides."""
        return dtype and (_tensor(spec, dtype, (positions, heads, spec.N)) if spec.heads else matrix(dtype))

    def vector(dtype):
        """(N,), or (H, N)."""
        if dtype is None:
            return None
        align = min(16, spec.vector * tk.element_type(dtype).width // 8)
        if spec.heads == "weight":
            return fake.tensor(dtype, (heads, spec.N), (spec.N, 1), align=align)
        return fake.tensor(dtype, (spec.N,), (1,), align=align)

    def column(wanted):
        return fake.tensor("fp32", (rows,), (1,), align=4) if wanted else None

    positions = fake.sym() if spec.heads else None
    return (loaded(spec.x), vector(spec.weight), vector(spec.bias), matrix(spec.result), loaded(spec.residual),
            matrix(spec.total), column(spec.stats), column(spec.stats and spec.kind == "layernorm"),
            _scales(spec, rows), Float32(0), Float32(0) if spec.offset else None)


def _tensor(spec, dtype, shape):
    strides = tuple(fake.sym64(divisibility=spec.vector) for _ in shape[:-1])
    return fake.tensor(dtype, shape, (*strides, 1), align=spec.vector * tk.element_type(dtype).width // 8)


def _scales(spec, rows):
    if spec.scale is None:
        return None
    if spec.scale == "row":
        return fake.tensor("fp32", (rows, 1), (1, 1), align=4)
    groups = -(-spec.N // GROUP)
    return fake.tensor("fp32", (rows, groups), (1, fake.sym64(divisibility=4)), align=4)
