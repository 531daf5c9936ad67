"""What the norms' public functions refuse, and in which words. Nothing is launched before."""
import numbers
from typing import Optional

import torch
from torch import Tensor

from ..runtime import check, dtypes
from .heads_plan import MAX_D
from .spec import MAX_N, WIDTH

TYPES = tuple(dtypes.torch_type(name) for name in WIDTH)


def norm(kind: str, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], residual: Optional[Tensor] = None,
         out_dtype: Optional[torch.dtype] = None, residual_dtype: Optional[torch.dtype] = None) -> None:
    """Raises what `tkq.rmsnorm` and `tkq.layernorm` promise."""
    _rows(kind, "x", x)
    _affine(kind, x, weight, bias)
    if residual is not None:
        check.dtype("residual", residual, tuple(WIDTH))
        check.shape("residual", residual, tuple(x.shape))
        check.last_dim_contiguous("residual", residual)
    check.same_device(x=x, weight=weight, bias=bias, residual=residual)
    for name, dtype in (("out_dtype", out_dtype), ("residual_dtype", residual_dtype)):
        if dtype is not None and dtype not in TYPES:
            raise TypeError(f"{kind}: {name}: got {dtype}, allowed are {', '.join(map(str, TYPES))}")


def eps(kind: str, eps: float) -> None:
    """TypeError, ValueError unless eps is a number from 0 on that is finite, in float32 too."""
    if check.is_traced(eps):  # what it will be is not known
        return
    if not isinstance(eps, (int, float)) and not isinstance(eps, numbers.Real):
        raise TypeError(f"{kind}: eps: got {type(eps).__name__}, expected a float")
    if not 0 <= eps < check.FLOAT32_END:
        raise ValueError(f"{kind}: eps: got {eps}, allowed are numbers from 0 on, all finite: up to 3.4e38")


def plain(eps):
    """eps for the dispatcher, which takes no other kinds of numbers (numpy's float32)."""
    return eps if isinstance(eps, (int, float)) or check.is_traced(eps) else float(eps)


def _rows(kind, name, x):
    check.dtype(name, x, tuple(WIDTH))
    if x.dim() == 0 or x.shape[-1] < 1:
        raise ValueError(f"{kind}: {name}: got shape {tuple(x.shape)}, allowed are (..., N) with N of 1 and more")
    if x.shape[-1] > MAX_N:
        raise NotImplementedError(f"{kind}: {name}: got N = {x.shape[-1]} columns, allowed are 1 to {MAX_N}")
    check.last_dim_contiguous(name, x)


def _affine(kind, x, weight, bias):
    shape = x.shape[-1:]
    if isinstance(weight, Tensor) and weight.dim() == 2 and x.dim() > 1:
        shape = x.shape[-2:]  # a weight for each head
    for name, t in (("weight", weight), ("bias", bias)):
        if t is None:
            continue
        check.dtype(name, t, tuple(WIDTH))
        check.shape(name, t, tuple(shape))
        if not t.is_contiguous():
            raise ValueError(f"{kind}: {name}: strides are {t.stride()}, allowed is contiguous: call .contiguous()")


def options(kind: str, weight: Optional[Tensor], weight_offset: float, prenorm: bool,
            residual_dtype: Optional[torch.dtype]) -> None:
    """Options that would do nothing."""
    check.finite(f"{kind}: weight_offset", weight_offset)
    if weight is None and weight_offset:
        raise ValueError(f"{kind}: weight_offset is {weight_offset}, but there is no weight that it could be added to")
    if residual_dtype is not None and not prenorm:
        raise ValueError(f"{kind}: residual_dtype is {residual_dtype}, but the sum is returned with prenorm=True only")


def gradient_of_heads(kind: str, x: Tensor, weight: Optional[Tensor]) -> None:
    """A gradient is recorded: what its kernel cannot do is said now."""
    if weight is not None and weight.dim() == 2 and x.shape[-1] > MAX_D:
        raise NotImplementedError(f"{kind}: a gradient with a weight for each head: x: got heads of {x.shape[-1]} "
                                  f"columns, allowed are 1 to {MAX_D}")
