"""From torch tensors to a launch."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.plan import plan
from tkq.linear_attention.spec import LinearSpec
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes


def recipe(spec: LinearSpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.kernel:build", (spec, plan(spec)))


class Given(NamedTuple):
    """What an engine's launch takes, as `kernel.Operands` has it. final: dtype of the final state, or None. x: for sums
    of o times x."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    initial: Tensor | None = None
    final: torch.dtype | None = None
    x: Tensor | None = None
    reverse: bool = False


class Made(NamedTuple):
    """o, the final state or None, (B, S, HO) sums of o times x or None."""

    o: Tensor
    state: Tensor | None
    dots: Tensor | None


def spec_of(given: Given) -> LinearSpec:
    """Of a launch."""
    def name(x):
        return None if x is None else dtypes.name_of(x if isinstance(x, torch.dtype) else x.dtype)

    g = given.g
    gate = "none" if g is None else "head" if g.dim() == 1 else "token"
    return LinearSpec(name(given.q), given.q.shape[-1], given.v.shape[-1], gate, name(given.initial), name(given.final),
                      given.reverse, name(given.beta), given.x is not None)


def launch(given: Given, scale: float) -> Made:
    """One launch of the engine."""
    q, k, v, g, beta, initial, final, x, _ = given
    (B, S, H, K), (HV, V) = q.shape, v.shape[2:]
    heads = max(H, HV)
    o = torch.empty(B, S, heads, V, device=v.device, dtype=v.dtype)
    state = None if final is None else torch.empty(B, heads, K, V, device=v.device, dtype=final)
    dots = None if x is None else torch.empty(-(-V // CHUNK), B, S, heads, device=v.device)
    if B * heads:
        function(recipe(spec_of(given)))((q, k, v, o, g, beta, initial, state, x, dots), scale)
    return Made(o, state, None if dots is None else dots.sum(0))


class Saved(NamedTuple):
    """What the gradients need of a forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    initial: Tensor | None
    final: Tensor | None  # the state, where its gradient comes


class Gradients(NamedTuple):
    """q's, k's and v's of each head of v; the gate's, as the gate; the initial state's, fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    initial: Tensor | None


def backward(saved: Saved, scale: float, do: Tensor, dfinal: Tensor | None = None) -> Gradients:
    """Each gradient is a linear attention of others of the tensors: dq in the order of the tokens, dk and dv in the
    reversed one. What the gates of a token and those behind it get is what queries from there on take from keys before:
    the sum over these tokens of q dq - v dv."""
    q, k, v, g, initial, final = saved
    dstate = None if initial is None else torch.float32
    # a launch multiplies by scale what its state gives, and the final state is not of the outputs
    behind = None if dfinal is None else dfinal / scale
    gated = g is not None
    dq = launch(Given(do, v, k, g, initial=_turned(initial), x=q if gated else None), scale)
    dk = launch(Given(v, do, q, g, initial=_turned(behind), reverse=True), scale)
    dv = launch(Given(k, q, do, g, initial=behind, final=dstate, x=v if gated else None, reverse=True), scale)
    dg = None
    if gated:
        dg = (dq.dots - dv.dots).flip(1).cumsum(1).flip(1)
        if dfinal is not None:
            dg = dg + (final * dfinal).sum((-1, -2))[:, None]
        if g.dim() == 1:
            dg = dg.sum((0, 1))
    return Gradients(dq.o, dk.o, dv.o, dg, None if initial is None else scale * dv.state)


def _turned(state):
    return None if state is None else state.transpose(-1, -2)
