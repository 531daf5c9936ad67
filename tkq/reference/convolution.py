"""Causal convolution along the tokens, in plain PyTorch: what it means. The path of CPU tensors, the tests' oracle.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from tkq.reference.linear_attention import _pieces
from tkq.reference.precision import _upcast
from tkq.runtime.call import autocast


@autocast.apart
def causal_conv1d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: Optional[str] = None,
                  initial_state: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None):
    """(y, final state), both wide: y[t] = activation(bias + sum of weight[:, i] x[t - W + 1 + i]).

    x: (B, S, C). weight: (C, W). bias: (C,). activation: None or "silu". States: (N, C, W - 1), what comes before each
    sequence, and its own last inputs, the oldest first; N is B, or the sequences between cu_seqlens (N + 1,) of B = 1,
    as `linear_attention.edges` takes them. y of tokens of no sequence is 0."""
    x = _upcast(x)
    (B, S, C), (_, W) = x.shape, weight.shape
    pieces = [(b, slice(0, S)) for b in range(B)] if cu_seqlens is None else [
        (0, tokens) for tokens in _pieces(cu_seqlens, S)]
    y, states = torch.zeros_like(x), []
    for n, (b, tokens) in enumerate(pieces):
        before = x.new_zeros(C, W - 1) if initial_state is None else initial_state[n].to(x.dtype)
        padded = torch.cat((before, x[b, tokens].mT), 1)  # (C, W - 1 + tokens)
        length = tokens.stop - tokens.start
        z = sum(weight[:, i, None].to(x.dtype) * padded[:, i:i + length] for i in range(W))
        z = z if bias is None else z + bias[:, None].to(x.dtype)
        y[b, tokens] = (F.silu(z) if activation == "silu" else z).mT
        states.append(padded[:, length:])
    return y, torch.stack(states) if states else x.new_zeros(0, C, W - 1)


@autocast.apart
def causal_conv1d_step(x: Tensor, conv_states: Tensor, weight: Tensor, bias: Optional[Tensor] = None,
                       activation: Optional[str] = None, cache_indices: Optional[Tensor] = None) -> Tensor:
    """y, wide, of x (N, T, C) or (N, C); the pool of states is updated in place. Arguments as `tkq.causal_conv1d_step`
    has them."""
    rows, ahead, y = x if x.dim() == 3 else x[:, None], weight.shape[1] - 1, torch.zeros_like(_upcast(x))
    for n in range(len(x)):
        row = n if cache_indices is None else int(cache_indices[n])
        if 0 <= row < len(conv_states):
            state = conv_states[row]
            found, _ = causal_conv1d(rows[n:n + 1], weight, bias, activation, state[None, :, state.shape[1] - ahead:])
            y[n] = found[0].view(y[n].shape)
            if rows.shape[1]:
                state.copy_(torch.cat((state, rows[n].mT.to(state.dtype)), 1)[:, rows.shape[1]:])
    return y


def causal_conv1d_backward(dy: Tensor, dfinal: Optional[Tensor], x: Tensor, weight: Tensor, bias: Optional[Tensor],
                           activation: Optional[str], initial_state: Optional[Tensor], cu_seqlens: Optional[Tensor]):
    """Gradients of x, weight, bias and initial_state, wide; None of what is not there. dfinal: None where the final
    state was not used."""
    leaves = [None if t is None else _upcast(t.detach()).requires_grad_() for t in (x, weight, bias, initial_state)]
    with torch.enable_grad():
        y, final = causal_conv1d(*leaves[:3], activation, leaves[3], cu_seqlens)
        total = (y * dy.to(y.dtype)).sum()
        if dfinal is not None:
            total = total + (final * dfinal.to(final.dtype)).sum()
        if not total.requires_grad:  # of no token
            return tuple(None if t is None else torch.zeros_like(t) for t in leaves)
        given = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(total, given, allow_unused=True, materialize_grads=True))
    return tuple(None if t is None else next(found) for t in leaves)
