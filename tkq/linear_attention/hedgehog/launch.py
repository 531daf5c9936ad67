"""From torch tensors to a launch of Hedgehog's attention."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.hedgehog.plan import plan
from tkq.linear_attention.hedgehog.spec import HedgehogSpec
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
        call = _launcher(given), ((q, k, v, o, *others), q.shape[3]**-0.5 / math.log(2))
        call[0](*call[1])
    return o, call


def _launcher(given):
    q, q_map = given.q, given.q_map
    key = q.get_device(), q.dtype, q.shape[3], q_map.shape[2]
    if key not in _launchers:
        arch.require_hopper(q.device)
        _launchers[key] = function(recipe(HedgehogSpec(dtypes.name_of(q.dtype), q.shape[3], q_map.shape[2])))
    return _launchers[key]
