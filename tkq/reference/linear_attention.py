"""Linear attention token by token, in plain PyTorch: what it means. The path of CPU tensors, the oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
import itertools
from typing import Optional

import torch
from torch import Tensor

from tkq.reference.precision import _upcast
from tkq.runtime.call import autocast


@autocast.apart
def linear_attn(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor] = None, scale: Optional[float] = None,
                initial_state: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None,
                beta: Optional[Tensor] = None):
    """(o, final state), both wide: o[t] = scale * q[t] S[t], S[t] = exp(g[t]) S[t-1] + k[t] u[t]' of each head.

    u is v; with beta (B, S, HV), the delta rule, it is beta[t] (v[t] - k[t] exp(g[t]) S[t-1]).

    q, k: (B, S, H, K). v: (B, S, HV, V); HV / H heads of v share one of q and k. g: None, (HV,), (B, S, HV) or
    (B, S, HV, K). States: (N, HV, K, V), N the sequences: B, or those between cu_seqlens (N + 1,) of B = 1, as `edges`
    takes them. o of tokens of no sequence is 0."""
    q, k, v = (_upcast(x) for x in (q, k, v))
    B, S, H, K = q.shape
    HV, V = v.shape[2:]
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    scale = K**-0.5 if scale is None else scale
    pieces = [(b, slice(0, S)) for b in range(B)] if cu_seqlens is None else [
        (0, tokens) for tokens in _pieces(cu_seqlens, S)]
    o, states = v.new_zeros(v.shape), []  # contiguous, however v lies
    for n, (b, tokens) in enumerate(pieces):
        state = v.new_zeros(HV, K, V) if initial_state is None else initial_state[n].to(v.dtype)
        decay = _decay(g, b, tokens, state)
        for i, t in enumerate(range(tokens.start, tokens.stop)):
            state = state if decay is None else decay[i] * state
            u = v[b, t]
            if beta is not None:
                u = beta[b, t].to(v.dtype)[:, None] * (u - (k[b, t, :, None, :] @ state)[:, 0])
            state = state + k[b, t, :, :, None] * u[:, None, :]
            o[b, t] = scale * (q[b, t, :, None, :] @ state)[:, 0]
        states.append(state)
    return o, torch.stack(states) if states else v.new_zeros(0, HV, K, V)


def edges(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """(N + 1,) int64: where sequences begin and end, whatever cu_seqlens say. A number below 0 counts as 0, one beyond
    the tokens as their number, one below a number before it as that one: sequences do not overlap."""
    return cu_seqlens.long().clamp(0, tokens).cummax(0).values


def _pieces(cu_seqlens, tokens):
    """The tokens of each sequence."""
    cuts = edges(cu_seqlens, tokens).tolist()
    return [slice(a, e) for a, e in itertools.pairwise(cuts)]


def _decay(g, b, tokens, state):
    """exp(g) of a sequence's tokens, (tokens, HV, 1 or K, 1); None without gates."""
    if g is None:
        return None
    g = g.to(state.dtype)
    if g.dim() == 1:
        g = g.expand(tokens.stop - tokens.start, -1)
    else:
        g = g[b, tokens]
    return (g[..., None] if g.dim() == 2 else g).exp()[..., None]


@autocast.apart
def linear_attn_backward(do: Tensor, dfinal: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor,
                         g: Optional[Tensor], initial_state: Optional[Tensor], scale: Optional[float],
                         cu_seqlens: Optional[Tensor] = None):
    """(dq, dk, dv, dg, dinitial), wide, None for what there is not: from the last token to the first, with the states
    of all tokens. dfinal: the final state's gradient, or None. g: as `linear_attn`'s."""
    if cu_seqlens is not None:
        return _of_each(linear_attn_backward, cu_seqlens, do, dfinal, (q, k, v, g), initial_state, scale)
    do, q, k, v = (_upcast(x) for x in (do, q, k, v))
    (B, S, H, K), (HV, V) = q.shape, v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    state = v.new_zeros(B, HV, K, V) if initial_state is None else initial_state.to(v.dtype)
    wide_q, wide_k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    decay = _decays(g, v)
    before = []  # what each token adds to
    for t in range(S):
        before.append(state if decay is None else decay[:, t] * state)
        state = before[t] + wide_k[:, t, :, :, None] * v[:, t, :, None]
    dstate = torch.zeros_like(state) if dfinal is None else dfinal.to(v.dtype)
    dq, dk, dv, dg = (torch.zeros_like(x) for x in (wide_q, wide_k, v, wide_k))
    for t in reversed(range(S)):
        after = before[t] + wide_k[:, t, :, :, None] * v[:, t, :, None]
        dq[:, t] = scale * (after @ do[:, t, :, :, None])[..., 0]
        dstate = dstate + scale * wide_q[:, t, :, :, None] * do[:, t, :, None]
        dk[:, t] = (dstate @ v[:, t, :, :, None])[..., 0]
        dv[:, t] = (wide_k[:, t, :, None] @ dstate)[:, :, 0]
        dg[:, t] = (dstate * before[t]).sum(-1)
        dstate = dstate if decay is None else decay[:, t] * dstate
    dq, dk = (x.unflatten(2, (H, -1)).sum(3) for x in (dq, dk))
    return dq, dk, dv, _dg(g, dg), None if initial_state is None else dstate


@autocast.apart
def gated_delta_rule_backward(do: Tensor, dfinal: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor,
                              g: Optional[Tensor], beta: Tensor, initial_state: Optional[Tensor],
                              scale: Optional[float], cu_seqlens: Optional[Tensor] = None):
    """(dq, dk, dv, dg, dbeta, dinitial) of `linear_attn` with beta, wide, None for what there is not: from the last
    token to the first, with the states of all tokens. dfinal: the final state's gradient, or None. g: None,
    (B, S, HV) or (B, S, HV, K)."""
    if cu_seqlens is not None:
        return _of_each(gated_delta_rule_backward, cu_seqlens, do, dfinal, (q, k, v, g, beta), initial_state, scale)
    do, q, k, v = (_upcast(x) for x in (do, q, k, v))
    (B, S, H, K), (HV, V) = q.shape, v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    state = v.new_zeros(B, HV, K, V) if initial_state is None else initial_state.to(v.dtype)
    wide_q, wide_k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    beta = beta.to(v.dtype)[..., None]
    decay = _decays(g, v)
    before, errors = [], torch.zeros_like(v)  # what each token adds to; what the state lacks of each value
    for t in range(S):
        before.append(state if decay is None else decay[:, t] * state)
        errors[:, t] = v[:, t] - _of(before[t], wide_k[:, t])
        state = before[t] + wide_k[:, t, :, :, None] * (beta * errors)[:, t, :, None]
    dstate = torch.zeros_like(state) if dfinal is None else dfinal.to(v.dtype)
    dq, dk, dv, dg, dbeta = (torch.zeros_like(x) for x in (wide_q, wide_k, v, wide_k, v[..., 0]))
    for t in reversed(range(S)):
        key, u = wide_k[:, t, :, :, None], (beta * errors)[:, t]
        dq[:, t] = scale * _of((before[t] + key * u[:, :, None]).mT, do[:, t])
        dstate = dstate + scale * wide_q[:, t, :, :, None] * do[:, t, :, None]
        du = _of(dstate, wide_k[:, t])
        dv[:, t], dbeta[:, t] = beta[:, t] * du, (errors[:, t] * du).sum(-1)
        dk[:, t] = _of(dstate.mT, u) - _of(before[t].mT, dv[:, t])
        dstate = dstate - key * dv[:, t, :, None]
        dg[:, t] = (dstate * before[t]).sum(-1)
        dstate = dstate if decay is None else decay[:, t] * dstate
    dq, dk = (x.unflatten(2, (H, -1)).sum(3) for x in (dq, dk))
    return dq, dk, dv, _dg(g, dg), dbeta, None if initial_state is None else dstate


def _of(state, x):
    """state' x of each head: (B, HV, K, V), (B, HV, K) -> (B, HV, V)."""
    return (x[..., None, :] @ state)[..., 0, :]


def _of_each(backward, cu_seqlens, do, dfinal, given, initial_state, scale):
    """A backward, of each sequence by itself; zeros for tokens of none. given: its tensors of tokens."""
    tensors = *given, initial_state
    found = [None if x is None else torch.zeros(x.shape, dtype=_upcast(do).dtype, device=x.device) for x in tensors]
    for n, tokens in enumerate(_pieces(cu_seqlens, do.shape[1])):
        parts = [x if x is None or x.dim() == 1 else x[:, tokens] for x in given]
        states = [None if x is None else x[n:n + 1] for x in (dfinal, initial_state)]
        *of_tokens, of_state = backward(do[:, tokens], states[0], *parts, states[1], scale)
        for to, x in zip(found, of_tokens):
            if x is not None and x.dim() == 1:
                to += x
            elif x is not None:
                to[:, tokens] = x
        if of_state is not None:
            found[-1][n] = of_state[0]
    return tuple(found)


def _decays(g, v):
    """exp(g) as (B, S, HV, 1 or K, 1); None without gates."""
    if g is None:
        return None
    g = g.to(v.dtype).exp()
    return g[..., None] if g.dim() == 4 else g.expand(v.shape[:3])[..., None, None]


def _dg(g, of_columns):
    """(B, S, HV, K), of which g may have the sums; None without gates."""
    if g is None or g.dim() == 4:
        return None if g is None else of_columns
    dg = of_columns.sum(-1)
    return dg.sum((0, 1)) if g.dim() == 1 else dg
