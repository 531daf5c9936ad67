"""The gradients of Mamba-2's state space dual: those of linear attention, of which q is C, k is B, v is d x and g is
d A, with d = clamp(softplus(dt + dt_bias)), and what follows from them.

Let do be the gradient of y before it is gated, dv that of v. With the tokens' decays as in `linear_attention.gradients`

    dC[t] = h[t]' do[t],   dB[t] = d[t] D[t]' x[t],   dv[t] = D[t] B[t],   D the gradient of the state
    dg[t] = the sum over t and the tokens behind it of C dC - d x dv, without what t itself has in both
    dx[t] = d[t] dv[t] + D_skip do[t],   dd[t] = x[t] dv[t] + A dg[t],   dA = the sum of d dg

and dt's gradient is that of d through the clamp and softplus. v is never written: launches multiply by d. What a token
has from itself, d (C B) (do x) in C dC and in d x dv, is the most of both where decays are strong, and would leave its
rounding in dg: the launches' sums are without it, and x dv has it from what they give beside them, do x and C B."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from tkq.linear_attention.finish.launch import over_shared
from tkq.linear_attention.gradients import over_values_concurrently, parts_of
from tkq.linear_attention.launch import Given
from tkq.linear_attention.packed_sequences import token_sequences
from tkq.linear_attention.split.launch import launch, sums_neighbours
from tkq.linear_attention.ssd.forward import SsdSaved, forward
from tkq.linear_attention.suffix.launch import step_gradients, suffix_sums
from tkq.reference import ssd as reference


class SsdNeeds(NamedTuple):
    """Which gradients are wanted."""

    x: bool = True
    dt: bool = True
    A: bool = True
    B: bool = True
    C: bool = True
    D: bool = True
    z: bool = True
    dt_bias: bool = True
    initial: bool = True


class SsdGradients(NamedTuple):
    """Of the tensors' shapes and types; None where it is not wanted."""

    x: Tensor | None = None
    dt: Tensor | None = None
    A: Tensor | None = None
    B: Tensor | None = None
    C: Tensor | None = None
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    initial: Tensor | None = None


ALL = SsdNeeds()


def backward(saved: SsdSaved, dy: Tensor, dfinal: Tensor | None = None, needs: SsdNeeds = ALL) -> SsdGradients:
    """A launch each for dC, dB and dx, which d's gradient is made of, too; with z one more, of y before it is gated,
    which is made again."""
    D, needs = saved.D, _there(saved, needs)
    do, dz, dD, dinitial = dy, None, None, None
    of = token_sequences(saved.cu, saved.x.shape[1])
    if saved.z is not None:
        do, dz = _ungated(saved, dy, needs.z)
        dz = dz if of is None or dz is None else of.only_inside(dz)
    of_steps = needs.dt or needs.A or needs.dt_bias
    of_c, of_b, of_x = _launched(saved, do, dfinal, needs, of_steps)
    found = None, None, None
    if needs.D:
        dD = of_x.of_skip.sum((0, 2) if D.dim() == 1 else 0).to(D.dtype)
    if needs.initial:
        dinitial = of_x.state.to(saved.initial.dtype)
    if of_steps:
        at_end = None if dfinal is None else (of_c.state * dfinal).sum((-1, -2))
        found = _of_steps(saved, of_c, of_x, at_end, of)
    ddt, dA, dbias = (x if needed else None for x, needed in zip(found, (needs.dt, needs.A, needs.dt_bias)))
    dB, dC = (over_shared(made.o, x) if needed else None
              for made, x, needed in ((of_b, saved.B, needs.B), (of_c, saved.C, needs.C)))
    return SsdGradients(of_x.o if needs.x else None, ddt, dA, dB, dC, dD, dz if needs.z else None, dbias, dinitial)


def _there(saved, needs):
    """Those that are wanted of tensors that there are."""
    return SsdNeeds(*(needed and x is not None for needed, x in zip(needs, saved)))


def _ungated(saved, dy, need_z):
    """(the gradient of y before it is gated, that of z or None)."""
    wide = torch.promote_types(dy.dtype, torch.float32)
    z = saved.z.to(wide)
    do, dz = (dy * silu(z)).to(dy.dtype), None
    if need_z:
        y = launch(forward(saved, gated=False), 1.0).o
        dz = torch.ops.aten.silu_backward(dy.to(wide) * y, z).to(saved.z.dtype)
    return do, dz


def _launched(saved, do, dfinal, needs, of_steps):
    """What makes each head's dC, with sums of C dC and, where there is a gradient of it, the final state, made again;
    each head's dB; and dx, with sums of x dv. Each where it is needed."""
    steps, initial = saved.steps, saved.initial

    def of_c(part):
        first = None if initial is None else initial[:, :, part]
        final = torch.float32 if of_steps and dfinal is not None else None
        return Given(do[..., part], saved.x[..., part], saved.B, initial=first, final=final,
                     x=saved.C if of_steps else None, steps=steps, cu=saved.cu, apart=True)

    def of_b(part):
        last = None if dfinal is None else dfinal[:, :, part]
        return Given(saved.x[..., part], do[..., part], saved.C, initial=last, reverse=True, steps=steps, cu=saved.cu)

    of_x = Given(saved.B, saved.C, do, initial=dfinal, final=torch.float32 if needs.initial else None,
                 x=saved.x if of_steps or needs.D else None, reverse=True, state_v_first=True, cu=saved.cu,
                 steps=steps._replace(skip=saved.D, skip_gradient=needs.D)), 1.0
    columns = do.shape[3]
    return over_values_concurrently(
        launch, columns, _of_neighbours(of_c, columns) if needs.C or of_steps else None,
        _of_neighbours(of_b, columns) if needs.B else None,
        of_x if needs.x or needs.D or needs.initial or of_steps else None)


def _of_neighbours(make, columns):
    """What a launch takes of a part: with outputs of two heads each, where they may be added up before they are
    written; of all parts alike: their outputs are added up."""
    first, *_ = parts_of(columns)
    summed = sums_neighbours(make(first))
    return lambda part: (make(part)._replace(summed=summed), 1.0)


def _by_launch(dots):
    """Are there kernels for what follows from these sums?"""
    return dots.is_cuda and dots.dtype == torch.float32 and dots.numel() > 0


def _of_steps(saved, of_c, of_x, at_end, of=None):
    """The gradients of dt, A and dt_bias. of_c, of_x: what makes dC and dx, with the sums of C dC and of x dv. of: the
    tokens' `TokenSequences`, where sequences are packed: what stands in tokens of none is in no sum, not even times
    0."""
    if _by_launch(of_x.dots):
        return step_gradients(of_c, of_x, saved.steps, at_end, saved.cu)
    bias, how = saved.dt_bias, (saved.softplus, saved.limit)
    raw = reference.biased(saved.dt, bias)
    d = reference.step_sizes(raw, *how)
    dg = suffix_sums(of_c.dots, d * of_x.dots, at_end, saved.cu)
    of_v = torch.addcmul(of_x.dots, of_c.diagonal, of_x.diagonal)
    ddt = reference.step_sizes_backward(torch.addcmul(of_v, saved.A, dg), raw, *how)
    if of is not None:
        ddt, d = of.only_inside(ddt), of.only_inside(d)
    return (ddt.to(saved.dt.dtype), (d * dg).sum((0, 1)),
            None if bias is None else ddt.sum((0, 1)).to(bias.dtype))
