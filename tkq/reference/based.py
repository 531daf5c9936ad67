"""Based in plain PyTorch: what it means. The path of CPU tensors, the oracle of the tests.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
from typing import Optional

from torch import Tensor

from tkq.reference.precision import _upcast
from tkq.runtime.call import autocast


@autocast.apart
def based(q: Tensor, k: Tensor, v: Tensor, scale: Optional[float] = None, use_norm: bool = True):
    """(o, sums), both wide: o[t] is the sum of w[t, j] v[j] over j <= t, with use_norm divided by that of w[t, j],
    sums (B, S, HV); w = 1 + s + s^2 / 2, s = scale * q[t] k[j].

    q, k: (B, S, H, D). v: (B, S, HV, V); HV / H heads of v share one of q and k."""
    q, k, v = _of_heads(q, k, v)
    w = _weights(_products(q, k, scale)).tril()
    sums = w.sum(-1)
    o = w @ v
    if use_norm:
        o = o / sums[..., None]
    return o.transpose(1, 2), sums.transpose(1, 2)


@autocast.apart
def based_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Optional[float] = None, use_norm: bool = True):
    """(dq, dk, dv), wide."""
    heads = q.shape[2]
    scale = q.shape[3]**-0.5 if scale is None else scale
    q, k, v = _of_heads(q, k, v)
    do = _upcast(do).transpose(1, 2)
    s = _products(q, k, scale)
    w = _weights(s).tril()
    dw = do @ v.mT
    if use_norm:
        sums = w.sum(-1, keepdim=True)
        do = do / sums
        dw = (dw - (dw * w).sum(-1, keepdim=True) / sums) / sums
    ds = scale * (dw * (1 + s)).tril()
    dq, dk, dv = (x.transpose(1, 2) for x in (ds @ k, ds.mT @ q, w.mT @ do))
    return dq.unflatten(2, (heads, -1)).sum(3), dk.unflatten(2, (heads, -1)).sum(3), dv


def _of_heads(q, k, v):
    """(B, HV, S, ..) each, wide."""
    q, k, v = (_upcast(x).transpose(1, 2) for x in (q, k, v))
    return *(x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k)), v


def _products(q, k, scale):
    return (q.shape[3]**-0.5 if scale is None else scale) * (q @ k.mT)


def _weights(s):
    return 1 + s + s * s / 2
