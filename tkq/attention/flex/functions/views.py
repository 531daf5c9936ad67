"""Captured tensors while a function is converted: what of their indices is known."""
from __future__ import annotations

from typing import NamedTuple

import torch


class Dim(NamedTuple):
    """What is left of a dimension: index i of it is ``first + i * step`` of the tensor's dimension ``of``."""

    of: int
    first: int
    step: int
    size: int


class View(NamedTuple):
    """A captured tensor with some of its indices known. fixed: a node for each dimension, None where there is none yet.
    free: the dimensions that are left, in order. detached: does no gradient go to it?"""

    slot: int
    tensor: torch.Tensor
    fixed: tuple
    free: tuple
    detached: bool = False


def whole(slot: int, tensor: torch.Tensor) -> View:
    """With no index known."""
    free = tuple(Dim(d, 0, 1, size) for d, size in enumerate(tensor.shape))
    return View(slot, tensor, (None,) * tensor.dim(), free)


def at(build, view: View, dim: int, index: int) -> View:
    """With an index, a node, in one of its free dimensions."""
    left = view.free[dim]
    if (left.first, left.step, left.size) != (0, 1, view.tensor.shape[left.of]):
        index = _inside(build, index, left)
    fixed = tuple(index if d == left.of else old for d, old in enumerate(view.fixed))
    return view._replace(fixed=fixed, free=(*view.free[:dim], *view.free[dim + 1:]))


def _inside(build, index, left: Dim):
    """An index of a slice as one of the tensor, kept inside of the slice."""
    kind = build.type_of(index)
    const = lambda value: build.const(value, kind)
    wrapped = build.binary("add", index, const(left.size))
    index = build.where(build.binary("lt", index, const(0)), wrapped, index)
    index = build.binary("max", build.binary("min", index, const(left.size - 1)), const(0))
    return build.binary("add", build.binary("mul", index, const(left.step)), const(left.first))


def select(build, view: View, dim: int, index: int) -> View:
    dim %= len(view.free)
    size = view.free[dim].size
    return at(build, view, dim, build.const(index + size if index < 0 else index, "i32"))


def sliced(view: View, dim=0, start=None, end=None, step=1) -> View:
    dim %= len(view.free)
    left = view.free[dim]
    inside = range(left.size)[slice(start, end, step)]
    new = Dim(left.of, left.first + inside.start * left.step, inside.step * left.step, len(inside))
    return view._replace(free=(*view.free[:dim], new, *view.free[dim + 1:]))


def permuted(view: View, name: str, args) -> View:
    """By permute, transpose or t."""
    order = list(range(len(view.free)))
    if name == "permute":
        order = [d % len(order) for d in args[0]]
    elif len(order) > 1:
        a, b = args[:2] if name == "transpose" else (0, 1)
        order[a], order[b] = order[b], order[a]
    return view._replace(free=tuple(view.free[d] for d in order))
