"""Tensors past torch's dispatcher, for what a call allocates and for what a launch reads. Plain eager mode alone."""
from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..device import arch

# What the code that torch.compile makes allocates and views with: 1.2 us, where torch.empty takes 2.7 and empty_like
# 2.0; half of what a view takes (an H100's host).
_guards = torch._C._dynamo.guards
_strided, _over = getattr(_guards, "_empty_strided_cuda", None), getattr(_guards, "_reinterpret_tensor", None)
_current, _filling = getattr(torch._C, "_cuda_getDevice", None), torch._C._get_deterministic_algorithms
_short = _strided is not None and _current is not None


@functools.cache
def _one_device() -> bool:
    """Then it is the current one. Asked when there is a CUDA tensor, after which no device comes or goes."""
    return torch.cuda.device_count() == 1


def empty(index: int, shape: tuple, stride: tuple, dtype: torch.dtype) -> Tensor:
    """A tensor that is not filled (but where torch is set to fill new memory).

    index: of the CUDA device, what ``get_device`` of another tensor says; below 0 the CPU. shape, stride: plain tuples.
    """
    if _short and index >= 0 and (_one_device() or index == _current()) and not _filling():
        return _strided(shape, stride, dtype)
    return torch.empty_strided(shape, stride, dtype=dtype, device=arch.device(index))


def maker(index: int):
    """`empty` without its first argument, for callers that need several tensors: what it asks is asked once."""
    if _short and index >= 0 and (_one_device() or index == _current()) and not _filling():
        return _strided
    return functools.partial(empty, index)


def layout_of(x: Tensor) -> tuple:
    """(x's shape, the strides of a contiguous tensor of that shape, `maker` of x's device): for results of x's shape
    and others, what they have in common asked once."""
    shape, index = tuple(x.shape), x.get_device()
    stride = (shape[1], 1) if len(shape) == 2 else x.stride() if x.is_contiguous() else strides(shape)
    if _short and index >= 0 and (_one_device() or index == _current()) and not _filling():
        return shape, stride, _strided
    return shape, stride, functools.partial(empty, index)


def contiguous(index: int, shape: tuple, dtype: torch.dtype) -> Tensor:
    """The same, contiguous."""
    if len(shape) == 2:
        return empty(index, shape, (shape[1], 1), dtype)
    return empty(index, shape, strides(shape), dtype)


def strides(shape: tuple) -> tuple:
    """Of a contiguous tensor."""
    found, step = [1], 1
    for n in shape[:0:-1]:
        step *= n or 1
        found.append(step)
    return tuple(found[::-1]) if shape else ()


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


def folded(t: Tensor, row_dims: int) -> Tensor | None:
    """t with all but the last `row_dims` dimensions made one, in its memory; None where that one has no stride."""
    shape, of = t.shape, t.stride()
    step = one_stride(t, row_dims)
    size, last = math.prod(shape[:len(shape) - row_dims]), tuple(shape[len(shape) - row_dims:])
    return None if step is None else over(t, (size, *last), (step, *of[len(of) - row_dims:]))


def one_stride(t: Tensor, row_dims: int) -> int | None:
    """The stride that describes all but the last `row_dims` dimensions as one; None where there is none."""
    shape, of = t.shape, t.stride()
    size, step = 1, math.prod(shape[len(shape) - row_dims:])  # of a dimension of one element: as if all were contiguous
    for i in range(len(shape) - row_dims - 1, -1, -1):
        n = shape[i]
        if n != 1:
            if size == 1:
                step = of[i]
            elif of[i] != size * step:
                return None
            size *= n
    return step


def rows(x: Tensor, m: int, n: int) -> Tensor:
    """The same of a contiguous x as (m, n)."""
    return over(x, (m, n), (n, 1))
