"""The gradients of Based: what they take of the outputs' gradient, and a launch for each."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.based.launch import Given, launch
from tkq.linear_attention.based.plan import gradient_plan
from tkq.linear_attention.based.spec import GradientSpec
from tkq.linear_attention.config import CHUNK
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernel -> its function; as many as kinds of call


def recipe(spec: GradientSpec) -> Recipe:
    """Of the kernel for q's gradient or k's."""
    return Recipe("tkq.linear_attention.based.gradient_kernel:BasedGradient", (spec, gradient_plan(spec)))


def prepare_recipe(spec: GradientSpec) -> Recipe:
    """Of the kernel for what they take of the outputs' gradient."""
    return Recipe("tkq.linear_attention.based.prepare_kernel:PrepareGradients", (spec,))


class Saved(NamedTuple):
    """What the gradients need of a forward. o, sums: with a norm, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor | None
    sums: Tensor | None


class OfOutputs(NamedTuple):
    """do: divided by the sums of weights and multiplied by times. delta: of each token the sum of do times o, or
    None."""

    do: Tensor
    delta: Tensor | None
    times: float


class GradientGiven(NamedTuple):
    """What a launch takes, as `gradient_kernel.GradientOperands` has it."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    delta: Tensor | None
    reverse: bool


def backward(saved: Saved, scale: float, do: Tensor, needs: tuple = (True, True, True)) -> tuple:
    """(dq, dk, dv) of the tensors' shapes and types; None where it is not wanted. With w the weights and s the scaled
    products that they are made of, and do divided by the weights' sums,

        dv[j] = sum of w[i, j] do[i]        over i >= j: the forward of other tensors, reversed and without a norm
        dq[i] = scale * sum of (do[i] v[j] - do[i] o[i]) (1 + s[i, j]) k[j]        over j <= i
        dk[j] = scale * sum of (do[i] v[j] - do[i] o[i]) (1 + s[i, j]) q[i]        over i >= j

    Heads of v that share one of q and k each give a dq and a dk of q's type, which torch adds up in float32."""
    q, k, v, *_ = saved
    if not do.numel():
        return tuple(x.new_zeros(x.shape) if needed else None for x, needed in zip((q, k, v), needs))
    of = prepare(saved, do)
    dq = dk = dv = None
    if needs[0]:
        dq = _of_shared(launch_gradient(GradientGiven(q, k, of.do, v, of.delta, False), scale, 1 / of.times), q)
    if needs[1]:
        dk = _of_shared(launch_gradient(GradientGiven(k, q, v, of.do, of.delta, True), scale, 1 / of.times), k)
    if needs[2]:
        dv = launch(Given(k, q, of.do, False, True), scale, 1 / of.times)[0]
        dv = dv if dv.shape == v.shape else dv.unflatten(2, (v.shape[2], -1)).sum(3)
    return dq, dk, dv


def times(dtype, tokens: int) -> float:
    """What do over the weights' sums is multiplied by: sums grow with the number of tokens. A power of 2 that keeps
    what float16 has to hold near the middle of its range; bfloat16 has float32's."""
    return 2.0**round(math.log2(max(tokens, 1)) / 2) if dtype == torch.float16 else 1.0


def prepare(saved: Saved, do: Tensor) -> OfOutputs:
    """One launch with a norm, none without."""
    o, sums = saved[3:]
    if sums is None:
        return OfOutputs(do, None, 1.0)
    factor = times(do.dtype, do.shape[1])
    to, delta = torch.empty_like(o), torch.empty_like(sums)
    key = "prepare", do.get_device(), do.dtype, do.shape[3]
    if key not in _launchers:
        arch.require_hopper(do.device)
        _launchers[key] = function(prepare_recipe(GradientSpec(dtypes.name_of(do.dtype), do.shape[3])))
    _launchers[key](do, (o, sums, to, delta), factor)
    return OfOutputs(to, delta, factor)


def launch_gradient(given: GradientGiven, scale: float, times: float) -> Tensor:
    """(B, S, HO, 16), of the tensors' type."""
    x, _, a, b, delta, reverse = given
    B, S, heads, V = *x.shape[:2], max(y.shape[2] for y in (x, a, b)), a.shape[3]
    parts = -(-V // CHUNK)
    dtype = x.dtype if parts == 1 else torch.float32
    dx = torch.empty(parts, B, S, heads, x.shape[3], device=x.device, dtype=dtype)
    key = x.get_device(), x.dtype, V, delta is None, reverse
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(recipe(GradientSpec(dtypes.name_of(x.dtype), V, delta is not None, reverse)))
    _launchers[key](x, (*given[1:5], dx), scale, times)
    return dx[0] if parts == 1 else dx.sum(0).to(x.dtype)


def _of_shared(gradient, x):
    """Of each head of v to each head of x."""
    if gradient.shape == x.shape:
        return gradient
    return gradient.unflatten(2, (x.shape[2], -1)).sum(3)
