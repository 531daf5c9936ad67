"""Gradients of the matrix product: two products more, and what brings their operands into shape."""
import torch.nn.functional as F
from torch import Tensor

from tkq.gemm.epilogue.spec import GATED
from tkq.reference import dense


def of_operands(multiply, dy, a, b, alpha, needed):
    """(da, db) of alpha * a @ b, each where it is needed: da = alpha dy b^T, db = alpha a^T dy, in their operands'
    type.

    multiply(x, y, alpha): alpha * x @ y. dy in another type is first rounded to theirs. db lies in memory as b does:
    that of a layer's weight, w.t(), is a matrix like w, which need not be copied to become w's."""
    needs_a, needs_b = needed
    if not (needs_a or needs_b):
        return None, None
    dy = ready(dy.to(a.dtype))
    da = multiply(dy, b.mT, alpha) if needs_a else None
    if not needs_b:
        return da, None
    turned = b.dim() == 2 and b.stride(0) == 1 and b.stride(1) != 1
    return da, multiply(dy.mT, a, alpha).mT if turned else multiply(a.mT, dy, alpha)


def ready(x: Tensor) -> Tensor:
    """x, or a copy where it is not as a product takes it: a gradient that autograd expanded, say."""
    if x.is_contiguous():  # asked first: what is traced then asks nothing of its sizes
        return x
    pitch = x.stride(-2) if x.stride(-1) == 1 else x.stride(-1) if x.stride(-2) == 1 else None
    return x if pitch is not None and pitch > 0 else x.contiguous()


def padded(x, y):
    """x and y with their inner dimension zero-padded to a multiple of 8."""
    more = -x.shape[-1] % 8
    return F.pad(x, (0, more)), F.pad(y, (0, 0, 0, more))


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation of a sum that autograd records: a pass of its own, with its own gradient."""
    if activation in GATED:
        from tkq.pointwise.gated_ops import geglu, swiglu  # with the first gated gradient

        kind, layout = GATED[activation]
        if kind == "swiglu":
            return swiglu(x, layout=layout)
        return geglu(x, approximate="tanh" if kind == "geglu_tanh" else "none", layout=layout)
    if ":" in activation:
        raise NotImplementedError(f"gemm: activation is {activation}, and a function of device numbers has no "
                                  "gradient; call it under torch.no_grad()")
    return dense.activate(x, activation)
