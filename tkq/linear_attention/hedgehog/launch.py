"""From torch tensors to a launch of Hedgehog's attention."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.hedgehog.config import WARPS, WindowConfig
from tkq.linear_attention.hedgehog.plan import feature_plan, plan
from tkq.linear_attention.hedgehog.spec import FeatureSpec, HedgehogSpec, WindowSpec
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
    """(o, of each token 1 over its denominator (B, S, H) fp32, (the function that was launched, its arguments) or
    None); no launch where there are no tokens."""
    q, k, v, *others = given
    o, call = torch.empty(v.shape, device=v.device, dtype=v.dtype), None
    inverse = torch.empty(v.shape[:3], device=v.device, dtype=torch.float32)
    if o.numel():
        # of powers of 2
        call = _launcher(given), (q, (k, v, o, *others, inverse), q.shape[3]**-0.5 / math.log(2))
        call[0](*call[1])
    return o, inverse, call


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


class OfWindow(NamedTuple):
    """The window's part of the gradients. dwindow: of each token, (B, S, H) fp32. largest: (B, H, 4) fp32, whose
    largest is that of inverse. dq, dk, dv: of q's type."""

    dwindow: Tensor
    largest: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def window_gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, inverse: Tensor, delta: Tensor, window: Tensor
                     ) -> OfWindow:
    """As `reference.hedgehog.in_window`."""
    dwindow = torch.empty(inverse.shape, device=q.device, dtype=torch.float32)
    largest = torch.empty(q.shape[0], q.shape[2], WARPS, device=q.device, dtype=torch.float32)
    gradients = [torch.empty(q.shape, device=q.device, dtype=q.dtype) for _ in range(3)]
    if q.numel():
        key = "window", q.get_device(), q.dtype, q.shape[3]
        if key not in _launchers:
            arch.require_hopper(q.device)
            _launchers[key] = function(window_recipe(WindowSpec(dtypes.name_of(q.dtype), q.shape[3])))
        _launchers[key](q, (k, v, do, *gradients, inverse, delta, dwindow, window.contiguous(), largest),
                        q.shape[3]**-0.5)
    return OfWindow(dwindow, largest, *gradients)


def feature_recipe(spec: FeatureSpec) -> Recipe:
    """The kernel's of the features' part of the gradients."""
    return Recipe("tkq.linear_attention.hedgehog.feature_kernel:FeatureGradients", (spec, feature_plan(spec)))


class OfFeatures(NamedTuple):
    """What a launch for the features takes, as `feature_kernel.Operands` has it, but for what it adds to and gives."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    x_map: Tensor
    y_map: Tensor
    inverse: Tensor
    delta: Tensor
    largest: Tensor
    linear: Tensor


def query_gradients(given: OfFeatures, dq: Tensor) -> tuple:
    """(dq_map (B, H, D, F), dlinear of each token (B, S, H)), fp32; dq is added to. x: queries, a: do."""
    dlinear = torch.empty(given.inverse.shape, device=dq.device, dtype=torch.float32)
    return _of_features("queries", given, dq, None, dlinear), dlinear


def key_gradients(given: OfFeatures, dk: Tensor, dv: Tensor) -> Tensor:
    """dk_map (B, H, D, F), fp32; dk and dv are added to. x: keys, a: v."""
    return _of_features("keys", given, dk, dv, None)


def _of_features(of, given, dx, dv, dlinear):
    B, _, H, D = dx.shape
    dmap = torch.empty(B, H, D, given.x_map.shape[2], device=dx.device, dtype=torch.float32)
    key = of, dx.get_device(), dx.dtype, D
    if key not in _launchers:
        arch.require_hopper(dx.device)
        _launchers[key] = function(feature_recipe(FeatureSpec(dtypes.name_of(dx.dtype), D, of)))
    x, *others = given
    _launchers[key](x, (*others, dx, dv, dlinear, dmap))
    return dmap
