"""Linear attention token by token, in plain PyTorch: what it means. The path of CPU tensors, the oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
from typing import Optional

import torch
from torch import Tensor

from tkq.reference.precision import _upcast


def linear_attn(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor] = None, scale: Optional[float] = None,
                initial_state: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None,
                beta: Optional[Tensor] = None):
    """(o, final state), both wide: o[t] = scale * q[t] S[t], S[t] = exp(g[t]) S[t-1] + k[t] u[t]' of each head.

    u is v; with beta (B, S, HV), the delta rule, it is beta[t] (v[t] - k[t] exp(g[t]) S[t-1]).

    q, k: (B, S, H, K). v: (B, S, HV, V); HV / H heads of v share one of q and k. g: None, (HV,), (B, S, HV) or
    (B, S, HV, K). States: (N, HV, K, V), N the sequences: B, or those between cu_seqlens (N + 1,) of B = 1."""
    q, k, v = (_upcast(x) for x in (q, k, v))
    B, S, H, K = q.shape
    HV, V = v.shape[2:]
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    scale = K**-0.5 if scale is None else scale
    pieces = [(b, slice(0, S)) for b in range(B)] if cu_seqlens is None else [
        (0, slice(a, e)) for a, e in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist())]
    o, states = torch.zeros_like(v), []
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
