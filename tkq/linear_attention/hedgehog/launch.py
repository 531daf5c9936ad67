"""From torch tensors to a launch of Hedgehog's attention."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.hedgehog.config import WindowConfig
from tkq.linear_attention.hedgehog.plan import plan
from tkq.linear_attention.hedgehog.spec import HedgehogSpec, WindowSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernel -> its function; as many as kinds of call


def recipe(spec: HedgehogSpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.hedgehog.kernel:HedgehogAttention", (spec, plan(spec)))


class Given(NamedTuple):
    """What a launch takes, as `kernel.Operands` has it."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_map: Tensor
    k_map: Tensor
    linear: Tensor
    window: Tensor


def start(given: Given) -> tuple:
    """(o, (the function that was launched, its arguments) or None); no launch where there are no tokens."""
    q, k, v, *others = given
    o, call = torch.empty(v.shape, device=v.device, dtype=v.dtype), None
    if o.numel():
        # of powers of 2
        call = _launcher(given), (q, (k, v, o, *others), q.shape[3]**-0.5 / math.log(2))
        call[0](*call[1])
    return o, call


def _launcher(given):
    q, q_map = given.q, given.q_map
    key = q.get_device(), q.dtype, q.shape[3], q_map.shape[2]
    if key not in _launchers:
        arch.require_hopper(q.device)
        _launchers[key] = function(recipe(HedgehogSpec(dtypes.name_of(q.dtype), q.shape[3], q_map.shape[2])))
    return _launchers[key]


def window_recipe(spec: WindowSpec) -> Recipe:
    """The kernel's of the window's part of the gradients."""
    return Recipe("tkq.linear_attention.hedgehog.window_kernel:WindowGradients", (spec, WindowConfig()))


def window_gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, far: Tensor, far_do: Tensor, linear: Tensor,
                     window: Tensor) -> tuple:
    """As `reference.hedgehog.in_window`; dq, dk and dv are of q's type."""
    numbers = [torch.empty(far.shape, device=q.device, dtype=torch.float32) for _ in range(3)]
    gradients = [torch.empty(q.shape, device=q.device, dtype=q.dtype) for _ in range(3)]
    if q.numel():
        key = "window", q.get_device(), q.dtype, q.shape[3]
        if key not in _launchers:
            arch.require_hopper(q.device)
            _launchers[key] = function(window_recipe(WindowSpec(dtypes.name_of(q.dtype), q.shape[3])))
        _launchers[key](q, (k, v, do, *gradients, far.contiguous(), far_do.contiguous(), *numbers,
                            linear.contiguous(), window.contiguous()), q.shape[3]**-0.5)
    return *numbers, *gradients
