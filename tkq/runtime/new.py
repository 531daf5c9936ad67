"""Tensors past torch's dispatcher, for what a call allocates and for what a launch reads. Plain eager mode alone."""
import torch
from torch import Tensor

from . import arch

# What the code that torch.compile makes allocates and views with: 1.2 us, where torch.empty takes 2.7 and empty_like
# 2.0; half of what a view takes (an H100's host).
_guards = torch._C._dynamo.guards
_strided, _over = getattr(_guards, "_empty_strided_cuda", None), getattr(_guards, "_reinterpret_tensor", None)
_current, _filling = getattr(torch._C, "_cuda_getDevice", None), torch._C._get_deterministic_algorithms
_short = _strided is not None and _current is not None


def empty(index: int, shape: tuple, stride: tuple, dtype: torch.dtype) -> Tensor:
    """A tensor that is not filled (but where torch is told to fill what is new).

    index: of the CUDA device, what ``get_device`` of another tensor says; below 0 the CPU. shape, stride: plain tuples.
    """
    if _short and index >= 0 and index == _current() and not _filling():
        return _strided(shape, stride, dtype)
    return torch.empty_strided(shape, stride, dtype=dtype, device=arch.device(index))


def contiguous(index: int, shape: tuple, dtype: torch.dtype) -> Tensor:
    """The same, contiguous."""
    if len(shape) == 2:
        return empty(index, shape, (shape[1], 1), dtype)
    return empty(index, shape, strides(shape), dtype)


def strides(shape: tuple) -> tuple:
    """Of a contiguous tensor."""
    found, step = (), 1
    for n in reversed(shape):
        found, step = (step, *found), step * max(n, 1)
    return found


def like(x: Tensor, index: int, dtype: torch.dtype) -> Tensor:
    """The same of x's shape. index: of x's device."""
    return empty(index, *_as(x), dtype)


def _as(x):
    """x's shape, and the strides of a contiguous tensor of that shape, as plain tuples."""
    shape = tuple(x.shape)
    return shape, x.stride() if x.is_contiguous() else strides(shape)


def over(x: Tensor, shape: tuple, stride: tuple) -> Tensor:
    """x's memory with other sizes and strides, for a launch: autograd does not learn that it is the same."""
    return x.as_strided(shape, stride) if _over is None else _over(x, shape, stride, 0)


def shaped(rows: Tensor, x: Tensor) -> Tensor:
    """Contiguous rows, which nobody else has, with x's shape: what is returned of what a launch has written."""
    return over(rows, *_as(x))


def rows(x: Tensor, m: int, n: int) -> Tensor:
    """The same of a contiguous x as (m, n)."""
    return over(x, (m, n), (n, 1))
