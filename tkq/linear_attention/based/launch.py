"""From torch tensors to launches of Based's forward."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.based.layout import HELD_MOMENTS, HELD_STATE, THREADS
from tkq.linear_attention.based.plan import plan, segments
from tkq.linear_attention.based.spec import BasedSpec
from tkq.linear_attention.config import CHUNK
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernel -> its function; as many as kinds of call


def recipe(spec: BasedSpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.based.kernel:Based", (spec, plan(spec)))


class Given(NamedTuple):
    """What the forward takes, as `kernel.Operands` has it. norm, reverse: as `BasedSpec` has them."""

    q: Tensor
    k: Tensor
    v: Tensor
    norm: bool = True
    reverse: bool = False


def launch(given: Given, scale: float, times: float = 1.0) -> tuple:
    """(o, (B, S, HO) sums of weights or None). times: what o is multiplied by, without a norm."""
    return start(given, scale, times)[:2]


def start(given: Given, scale: float, times: float = 1.0) -> tuple:
    """(o, the sums or None, (the function of the one launch, its arguments), or None where there were none or two)."""
    q, k, v, norm, _ = given
    (B, S, H, _), (HV, V) = q.shape, v.shape[2:]
    heads, device = max(H, HV), v.device
    o = torch.empty(B, S, heads, V, device=device, dtype=v.dtype)
    sums = torch.empty(B, S, heads, device=device, dtype=torch.float32) if norm else None
    if not B * S * heads:
        return o, sums, None
    parts, chunks = -(-V // CHUNK), -(-S // CHUNK)
    count = segments(parts * B * heads, S, arch.num_sms(device))
    if count == 1:
        call = _launcher(given, None), (q, (k, v, o, sums, None, None), scale, times, heads, 1, chunks)
        call[0](*call[1])
        return o, sums, call
    each = -(-chunks // count)
    count = -(-chunks // each)
    states = torch.empty(count - 1, B, heads, parts, HELD_STATE, THREADS, device=device, dtype=torch.float32)
    moments = torch.empty(count - 1, B, heads, HELD_MOMENTS, THREADS, device=device, dtype=torch.float32) if norm \
        else None
    _launcher(given, "states")(q, (k, v, None, None, states, moments), scale, times, heads, count - 1, each)
    _launcher(given, "outputs")(q, (k, v, o, sums, states, moments), scale, times, heads, count, each)
    return o, sums, None


def _launcher(given, part):
    q, _, v, norm, reverse = given
    key = q.get_device(), q.dtype, v.shape[3], norm, reverse, part
    if key not in _launchers:
        arch.require_hopper(q.device)
        _launchers[key] = function(recipe(BasedSpec(dtypes.name_of(q.dtype), v.shape[3], norm, reverse, part)))
    return _launchers[key]
