"""From torch tensors to a launch."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.plan import plan
from tkq.linear_attention.spec import LinearSpec, SsdSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # what decides the kernel -> its function; as many as kinds of call


def recipe(spec: LinearSpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.engine.kernel:LinearAttention", (spec, plan(spec)))


class Steps(NamedTuple):
    """Mamba-2's part of a launch, as `ssd.SsdOperands` has it: d = clamp(softplus(dt + bias), low, high), or without
    softplus. gated: o is multiplied by silu(x). skip_gradient: the sums over tokens of v times x come out."""

    dt: Tensor
    A: Tensor
    bias: Tensor | None
    softplus: bool
    low: float
    high: float
    skip: Tensor | None = None
    gated: bool = False
    skip_gradient: bool = False

    @property
    def spec(self) -> SsdSpec:
        dt, bias, skip = (x if x is None else dtypes.name_of(x.dtype) for x in (self.dt, self.bias, self.skip))
        return SsdSpec(dt, bias, self.softplus, skip, 1 if skip is None else self.skip.dim(), self.gated,
                       self.skip_gradient)


class Given(NamedTuple):
    """What an engine's launch takes, as `kernel.Operands` has it. final: dtype of the final state, or None. x: for sums
    of o times x, or, with steps.gated, what o is multiplied by. reverse, strict, updates, others: as `LinearSpec` has
    them. cu: where packed sequences begin and end. state_indices: initial is a pool, which is written, too; final is
    its dtype.
    v_first: the final state lies in memory as (.., V, K). steps: Mamba-2's, in the place of g, not with cu and
    state_indices. state_v_first: states are (.., V, K)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    initial: Tensor | None = None
    final: torch.dtype | None = None
    x: Tensor | None = None
    reverse: bool = False
    strict: bool = False
    updates: bool = False
    cu: Tensor | None = None
    state_indices: Tensor | None = None
    v_first: bool = False
    steps: Steps | None = None
    state_v_first: bool = False
    others: bool = False

    @property
    def dot(self) -> bool:
        """Are there sums of o times x?"""
        return self.x is not None and not (self.steps and self.steps.gated)


class Made(NamedTuple):
    """o, the final state or None, (B, S, HO) sums of o times x or None, o times beta of what is reversed with it.
    of_skip: (B, HO, V), D's gradient, or None. diagonal: with steps and dots (B, S, HO), q k of each token."""

    o: Tensor
    state: Tensor | None
    dots: Tensor | None
    dv: Tensor | None = None
    of_skip: Tensor | None = None
    diagonal: Tensor | None = None


def spec_of(given: Given) -> LinearSpec:
    """Of a launch."""
    def name(x):
        return None if x is None else dtypes.name_of(x if isinstance(x, torch.dtype) else x.dtype)

    g, steps = given.g, given.steps
    gate = "token" if steps else "none" if g is None else "head" if g.dim() == 1 else "token"
    return LinearSpec(name(given.q), given.q.shape[-1], given.v.shape[-1], gate, name(given.initial), name(given.final),
                      given.reverse, name(given.beta), given.dot, given.strict, given.updates, name(given.cu),
                      name(given.state_indices), steps and steps.spec, given.state_v_first, given.others)


def launch(given: Given, scale: float) -> Made:
    """One launch of the engine; none where there are no tokens."""
    return start(given, scale)[0]


def start(given: Given, scale: float) -> tuple:
    """(what is made, (the function that was launched, its arguments) or None)."""
    q, k, v, g, beta, initial, _, x, *_ = given
    (B, S, H, _), (HV, V) = q.shape, v.shape[2:]
    heads, device, steps = max(H, HV), v.device, given.steps
    o = torch.empty(B, S, heads, V, device=device, dtype=v.dtype)
    state = initial if given.state_indices is not None else _final(given, heads)
    dots = torch.empty(-(-V // CHUNK), B, S, heads, device=device, dtype=torch.float32) if given.dot else None
    dv = torch.empty_like(o) if beta is not None and given.reverse else None
    of_skip = None
    if steps and steps.skip_gradient:
        of_skip = torch.empty(B, heads, V, device=device, dtype=torch.float32)
    diagonal = None
    if steps and given.dot:
        diagonal = torch.empty(B, S, heads, device=device, dtype=torch.float32)
    call = None
    if given.cu is not None and given.cu.shape[0] == 1:  # no sequence has these tokens
        o.zero_()
        dv = None if dv is None else dv.zero_()
    elif B * S * heads:
        of_steps = steps and (steps.dt, steps.A, steps.bias, steps.skip, steps.low, steps.high, of_skip, diagonal)
        call = _launcher(given), ((q, k, v, o, g, beta, initial, state, x, dots, dv, given.cu, given.state_indices),
                                  scale, of_steps)
        call[0](*call[1])
    else:
        if state is not None and state is not initial:
            state.zero_() if initial is None else state.copy_(initial)
        if of_skip is not None:
            of_skip.zero_()
    dots = dots if dots is None else dots[0] if len(dots) == 1 else dots.sum(0)
    return Made(o, state, dots, dv, of_skip, diagonal), call


def _final(given, heads):
    """Room for the final states; None where they are not asked for."""
    if given.final is None:
        return None
    if given.state_v_first:
        sizes = given.q.shape[0], heads, given.v.shape[3], given.q.shape[3]
        return torch.empty(sizes, device=given.v.device, dtype=given.final)
    return no_states(given.q, given.v, given.cu, given.v_first, given.final, heads)


def no_states(q, v, cu, v_first, dtype=torch.float32, heads=None) -> Tensor:
    """Room for final states, (N, HV, K, V), of which K or V comes first in memory."""
    count, sizes = q.shape[0] if cu is None else cu.shape[0] - 1, (q.shape[3], v.shape[3])
    shape = count, heads or v.shape[2], *(reversed(sizes) if v_first else sizes)
    found = torch.empty(shape, device=v.device, dtype=dtype)
    return found.mT if v_first else found


def _launcher(given):
    q, _, v, g, beta, initial, final, x, *ways = given[:11]
    types = (t if t is None else t.dtype for t in (beta, initial, given.cu, given.state_indices))
    of_steps = given.steps and given.steps.spec
    gate = 0 if g is None else g.dim()
    key = (q.get_device(), q.dtype, q.shape[3], v.shape[3], gate, *types, final, x is None, of_steps,
           given.state_v_first, given.others, *ways)
    if key not in _launchers:
        arch.require_hopper(q.device)
        _launchers[key] = function(recipe(spec_of(given)))
    return _launchers[key]
