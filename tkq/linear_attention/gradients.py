"""The gradients of linear attention: three launches of the engine, and sums of what they give."""
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tkq.linear_attention.config import CHUNK
from tkq.linear_attention.finish.launch import over_shared
from tkq.linear_attention.launch import Given, Made
from tkq.linear_attention.spec import NARROW
from tkq.linear_attention.split.concurrent import concurrently
from tkq.linear_attention.split.launch import launch
from tkq.linear_attention.suffix.launch import suffix_sums


class Saved(NamedTuple):
    """What the gradients need of a forward. cu: where packed sequences begin and end."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    initial: Tensor | None
    cu: Tensor | None = None


class Needs(NamedTuple):
    """Which gradients are wanted."""

    q: bool = True
    k: bool = True
    v: bool = True
    g: bool = True
    initial: bool = True


class Gradients(NamedTuple):
    """Of the tensors' shapes and types; None where it is not wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    g: Tensor | None
    initial: Tensor | None


ALL = Needs()
SMALLEST = 2.0**-6  # what queries of fp16 are multiplied by: those of usual sizes stay normal numbers


class Behind(NamedTuple):
    """What the launches take whose state begins with the final state's gradient: queries and scale, whose product is
    that of the call's, and the gradient over this scale, or None."""

    q: Tensor
    scale: float
    state: Tensor | None


def behind_last(q: Tensor, scale: float, dfinal: Tensor | None) -> Behind:
    """A launch multiplies by scale what its state gives, and the final state is not of the outputs: its gradient is
    divided by it. In fp16 queries take the scale's power of 2, which is exact: a state that is larger by 1 / scale
    would be infinite where its gradient is not."""
    if dfinal is None:
        return Behind(q, scale, None)
    if q.dtype == torch.float16:
        unit = min(max(2.0**(math.frexp(scale)[1] - 1), SMALLEST), 1.0)
        q, scale = q * unit, scale / unit
    return Behind(q, scale, dfinal / scale)


def backward(saved: Saved, scale: float, do: Tensor, dfinal: Tensor | None = None,
             needs: Needs = ALL) -> Gradients:
    """Each gradient is a linear attention of others of the tensors: dq in the order of the tokens, dk and dv in the
    reversed one. What the gates of a token and those behind it get is what queries from there on take from keys before:
    the sum over these tokens of q dq - v dv.

    Heads of v that share one of q and k each give a dq and a dk of 16 bits, which are added up in float32. The final
    state, whose product with its gradient all gates get, is made again beside dq: more exactly than the forward's."""
    q, k, _, g, initial, cu = saved
    needs = Needs(*needs[:3], needs.g and g is not None, needs.initial and initial is not None)
    if scale == 0.0:  # o is 0: what goes back comes from the final state alone, and does not depend on the scale
        do, scale = torch.zeros_like(do), 1.0
    behind = behind_last(q, scale, dfinal)
    dq = dk = dv = dg = dinitial = None
    of_q, of_k, of_v = _launched(saved, behind, scale, do, needs, dfinal is not None)
    if needs.q:
        dq = over_shared(of_q.o, q)
    if needs.k:
        dk = over_shared(of_k.o, k)
    if needs.v:
        dv = of_v.o
    if needs.initial:
        dinitial = (behind.scale * of_v.state).to(initial.dtype)
    if needs.g:
        at_end = None if dfinal is None else (of_q.state.mT * dfinal).sum((-1, -2))
        dg = of_gates(g, of_q.dots, of_v.dots, at_end, cu)
    return Gradients(dq, dk, dv, dg, dinitial)


def _launched(saved, behind, scale, do, needs, final_too):
    """What makes dq, dk and dv, each where it is needed, with the sums that dg is made of. final_too: the final state
    has a gradient."""
    q, k, v, g, initial, cu = saved

    def of_q(part):
        final = torch.float32 if needs.g and final_too else None
        return Given(do[..., part], v[..., part], k, g, initial=turned_part(initial, part), final=final,
                     x=q if needs.g else None, cu=cu, apart=True), scale

    def of_k(part):
        return Given(v[..., part], do[..., part], behind.q, g, initial=turned_part(behind.state, part), reverse=True,
                     cu=cu), behind.scale

    values = Given(k, behind.q, do, g, initial=behind.state, final=torch.float32 if needs.initial else None,
                   x=v if needs.g else None, reverse=True, cu=cu, apart=True), behind.scale
    return over_values_concurrently(
        launch, v.shape[3], of_q if needs.q or needs.g else None, of_k if needs.k else None,
        values if needs.v or needs.g or needs.initial else None)


def parts_of(columns: int) -> tuple[slice, ...]:
    """V's columns in parts, of which an operand in K's place may have 128 at most; the first is the widest."""
    if columns <= NARROW:
        return (slice(None),)
    half = -(-columns // 32) * 16
    return slice(half), slice(half, None)


def over_values_concurrently(launch, columns: int, first, second, whole: tuple | None) -> tuple:
    """What `launch` gives of three: first and second are functions from a part of V's columns to what it takes, whole
    is that of all columns; None of None. Concurrently, where V is one part, those that take longest first."""
    if len(parts_of(columns)) == 1:
        one, three, two = concurrently(launch, first and first(slice(None)), whole, second and second(slice(None)))
        return one, two, three
    return *(make and over_values(columns, lambda part, make=make: launch(*make(part)), True)
             for make in (first, second)), whole and launch(*whole)


def over_values(columns: int, make, apart: bool = False) -> Made:
    """The sum of `make(part)` over `parts_of` V's columns, and their states (B, HV, V, K) as one. apart: sums of o
    times x are as `launch.Given` has them, and stay apart."""
    first, *others = (make(part) for part in parts_of(columns))
    if not others:
        return first
    second, = others
    state = None if first.state is None else torch.cat((first.state, second.state), 2)
    dv, diagonal = (None if x is None else x + y for x, y in (
        (first.dv, second.dv), (first.diagonal, second.diagonal)))
    dots = first.dots
    if dots is not None:
        dots = torch.cat((dots, second.dots)) if apart and dots.dim() == 4 else dots + second.dots
    return Made(first.o + second.o, state, dots, dv, diagonal=diagonal)


def of_gates(g, x, less, at_end, cu=None):
    """x - less: (B, S, HV), or parts of them as `suffix_sums` has them, those of each token, of tokens of no sequence
    anything; at_end: (B or N, HV), what the final state's gradient adds to all. cu: where packed sequences begin and
    end, or None."""
    dg = suffix_sums(x, less, end=at_end, cu=cu)
    return dg.sum((0, 1)) if g.dim() == 1 else dg.contiguous()


def of_gates_in_segments(x, less, ends):
    """Likewise, where ends (B, N, HV) are what all pairs of a token of a segment, or one before it, and one behind it
    add: sums end with a segment."""
    (B, N, H), S = ends.shape, x.shape[-2]
    each = -(-S // (CHUNK * N)) * CHUNK

    def cut(y):
        y = y if N * each == S else pad(y, (0, 0, 0, N * each - S))
        return y.reshape(*y.shape[:-3], B * N, each, H)

    return suffix_sums(cut(x), cut(less), end=ends.reshape(B * N, H)).view(B, N * each, H)[:, :S].contiguous()


def turned_part(state, part):
    """(B, HV, part of V, K)"""
    return None if state is None else state[..., part].transpose(-1, -2)
