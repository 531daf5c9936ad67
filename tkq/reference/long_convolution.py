"""Long convolutions through torch.fft: what they mean. The path of CPU tensors, the tests' oracle.

Computed in float32 (float64 stays float64), rounded once at the end.
"""
from typing import Optional

import torch
from torch import Tensor

from tkq.reference.precision import _upcast
from tkq.runtime.call import autocast


@autocast.apart
def fft_conv(u: Tensor, k: Tensor, d: Optional[Tensor] = None, causal: bool = True, pre_gate: Optional[Tensor] = None,
             post_gate: Optional[Tensor] = None) -> Tensor:
    """y, wide, of arguments as `tkq.fft_conv` has them."""
    u, k, d, pre, post = _wide(u, k, d, pre_gate, post_gate)
    v, L = _times(u, pre), u.shape[-1]
    if not v.numel() or not k.shape[-1]:
        y = torch.zeros_like(v)
    else:
        points = L + k.shape[-1] - 1 if causal else L
        y = torch.fft.irfft(_spectrum(v, points) * _spectrum(_taps(k, L, causal), points), points)[..., :L]
    return _times(y if d is None else y + d[:, None] * v, post)


@autocast.apart
def fft_conv_backward(dy: Tensor, u: Tensor, k: Tensor, d: Optional[Tensor] = None, causal: bool = True,
                      pre_gate: Optional[Tensor] = None, post_gate: Optional[Tensor] = None):
    """Gradients of u, k, d, pre_gate and post_gate, wide; None of what is not there."""
    u, dy, k, d, pre, post = _wide(u, dy, k, d, pre_gate, post_gate)
    v, dc, L, taps = _times(u, pre), _times(dy, post), u.shape[-1], k.shape[-1]
    dv, dk = torch.zeros_like(v), torch.zeros_like(k)
    if v.numel() and taps:
        points = L + taps - 1 if causal else L
        of_dc = _spectrum(dc, points)
        dv = torch.fft.irfft(of_dc * _spectrum(_taps(k, L, causal), points).conj_physical(), points)[..., :L]
        found = torch.fft.irfft((of_dc * _spectrum(v, points).conj_physical()).sum(0), points)
        dk = found[:, :taps] if causal else found[:, torch.arange(taps, device=k.device) % L]
        if causal and taps > L:
            dk[:, L:] = 0
    if d is not None:
        dv = dv + d[:, None] * dc
    dd = None if d is None else (dc * v).sum((0, 2))
    dpost = None if post is None else dy * fft_conv(u, k, d, causal, pre)
    return _times(dv, pre), dk, dd, None if pre is None else dv * u, dpost


def _wide(u, *others):
    u = _upcast(u)
    return u, *(None if t is None else t.to(u.dtype) for t in others)


def _times(x, gate):
    return x if gate is None else x * gate


def _taps(k, tokens, causal):
    """Not causal: those that are as many tokens apart are one."""
    if causal or k.shape[-1] <= tokens:
        return k
    padded = torch.nn.functional.pad(k, (0, -k.shape[-1] % tokens))
    return padded.view(k.shape[0], -1, tokens).sum(1)


def _spectrum(x, points):
    return torch.fft.rfft(x, points)
