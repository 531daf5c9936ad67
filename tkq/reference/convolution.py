"""Causal convolution along the tokens, in plain PyTorch: what it means. The path of CPU tensors, the tests' oracle.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
import itertools
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from tkq.reference.linear_attention import _pieces
from tkq.reference.precision import _upcast
from tkq.runtime.call import autocast

EPS = 1e-6  # as `tkq.convolution.spec` has it


@autocast.apart
def causal_conv1d(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None, activation: Optional[str] = None,
                  initial_state: Optional[Tensor] = None, cu_seqlens: Optional[Tensor] = None, norm_heads: int = 0,
                  head_dim: int = 128):
    """(y, final state), both wide: y[t] = activation(bias + sum of weight[:, i] x[t - W + 1 + i]).

    x: (B, S, C). weight: (C, W). bias: (C,). activation: None or "silu". States: (N, C, W - 1), what comes before each
    sequence, and its own last inputs, the oldest first; N is B, or the sequences between cu_seqlens (N + 1,) of B = 1,
    as `linear_attention.edges` takes them. y of tokens of no sequence is 0. In cu_seqlens' place, without states:
    seq_idx (B, S), of which neighbouring tokens of one number are a sequence. norm_heads: see `normed`."""
    x = _upcast(x)
    (B, S, C), W = x.shape, weight.shape[1]
    y, states = torch.zeros_like(x), []
    for n, (b, tokens) in enumerate(_of_sequences(B, S, cu_seqlens)):
        padded = _padded(x[b, tokens], None if initial_state is None else initial_state[n], W)
        z = _taps(padded, weight, bias)
        y[b, tokens] = normed(F.silu(z) if activation == "silu" else z, norm_heads, head_dim).mT
        states.append(padded[:, z.shape[1]:])
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


@autocast.apart
def causal_conv1d_backward(dy: Tensor, dfinal: Optional[Tensor], x: Tensor, weight: Tensor, bias: Optional[Tensor],
                           activation: Optional[str], initial_state: Optional[Tensor], cu_seqlens: Optional[Tensor],
                           norm_heads: int = 0, head_dim: int = 128):
    """Gradients of x, weight, bias and initial_state, wide; None of what is not there. dfinal: None where the final
    state was not used."""
    wide = _upcast(x)
    (B, S, _), W = x.shape, weight.shape[1]
    dy, weight, bias, state, dfinal = (None if t is None else t.to(wide.dtype) for t in (
        dy, weight, bias, initial_state, dfinal))
    dx, dweight, dstates = torch.zeros_like(wide), torch.zeros_like(weight), []
    dbias = None if bias is None else torch.zeros_like(bias)
    for n, (b, tokens) in enumerate(_of_sequences(B, S, cu_seqlens)):
        padded = _padded(wide[b, tokens], None if state is None else state[n], W)
        z = _taps(padded, weight, bias)
        dz, length, dpadded = dy[b, tokens].mT, z.shape[1], torch.zeros_like(padded)
        dz = normed_gradient(F.silu(z) if activation == "silu" else z, dz, norm_heads, head_dim)
        if activation == "silu":
            gate = z.sigmoid()
            dz = dz * gate * (1 + z * (1 - gate))
        for i in range(W):
            dweight[:, i] += (dz * padded[:, i:i + length]).sum(1)
            dpadded[:, i:i + length] += weight[:, i, None] * dz
        if dbias is not None:
            dbias += dz.sum(1)
        if dfinal is not None:
            dpadded[:, length:] += dfinal[n]
        dx[b, tokens] = dpadded[:, W - 1:].mT
        dstates.append(dpadded[:, :W - 1])
    dstate = None if state is None else torch.stack(dstates) if dstates else torch.zeros_like(state)
    return dx, dweight, dbias, dstate


def normed(y: Tensor, heads: int, head: int) -> Tensor:
    """y (.., C, tokens), the first heads of `head` channels divided by sqrt(sum of squares + EPS)."""
    if not heads:
        return y
    of = y[..., :heads * head, :].unflatten(-2, (heads, head))
    of = of * (of.square().sum(-2, keepdim=True) + EPS).rsqrt()
    return torch.cat((of.flatten(-3, -2), y[..., heads * head:, :]), -2)


def normed_gradient(y: Tensor, dy: Tensor, heads: int, head: int) -> Tensor:
    """y's gradient, of dy, that of `normed`'s result."""
    if not heads:
        return dy
    of, d = (x[..., :heads * head, :].unflatten(-2, (heads, head)) for x in (y, dy))
    scale = (of.square().sum(-2, keepdim=True) + EPS).rsqrt()
    d = scale * (d - scale.square() * of * (of * d).sum(-2, keepdim=True))
    return torch.cat((d.flatten(-3, -2), dy[..., heads * head:, :]), -2)


def _of_sequences(batch, tokens, cu_seqlens):
    """(row of x, its tokens) of each sequence."""
    if cu_seqlens is None:
        return [(b, slice(0, tokens)) for b in range(batch)]
    if cu_seqlens.dim() == 2:  # numbers of tokens
        found = []
        for b, numbers in enumerate(cu_seqlens.tolist()):
            first = [t for t in range(tokens) if not t or numbers[t] != numbers[t - 1]]
            found += [(b, slice(*piece)) for piece in itertools.pairwise([*first, tokens])] if first else []
        return found
    return [(0, piece) for piece in _pieces(cu_seqlens, tokens)]


def _padded(x, state, width):
    """x (tokens, C) with what is before it, (C, width - 1 + tokens)."""
    before = x.new_zeros(x.shape[1], width - 1) if state is None else state.to(x.dtype)
    return torch.cat((before, x.mT), 1)


def _taps(padded, weight, bias):
    """What the activation is of, (C, tokens)."""
    length = padded.shape[1] - weight.shape[1] + 1
    z = sum(weight[:, i, None].to(padded.dtype) * padded[:, i:i + length] for i in range(weight.shape[1]))
    return z if bias is None else z + bias[:, None].to(padded.dtype)
