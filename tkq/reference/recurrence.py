"""Recurrences along the tokens, in plain PyTorch: what they mean. The path of CPU tensors, the tests' oracle.

Computed in float32 (float64 stays float64), rounded once at the end. Clear rather than fast.
"""
from typing import Optional

import torch
from torch import Tensor

from tkq.reference.precision import _upcast
from tkq.runtime.call import autocast


@autocast.apart
def scan(a: Tensor, b: Tensor, initial_state: Optional[Tensor] = None, reverse: bool = False):
    """(h, final state), both wide: h[t] = a[t] h[t - 1] + b[t], from the last token to the first with `reverse`.

    a, b: (B, T, C). initial_state: (B, C), None: zeros."""
    a, b = _upcast(a), _upcast(b)
    state = a.new_zeros(a.shape[0], a.shape[2]) if initial_state is None else initial_state.to(a.dtype)
    h = torch.empty_like(a)
    for t in _order(a.shape[1], reverse):
        state = h[:, t] = a[:, t] * state + b[:, t]
    return h, state.clone()


@autocast.apart
def scan_backward(dh: Tensor, dfinal: Optional[Tensor], a: Tensor, h: Tensor, initial_state: Optional[Tensor],
                  reverse: bool):
    """Gradients of a, b and initial_state, wide, the last also where there is no state. dfinal: None where the final
    state was not used."""
    a, h = _upcast(a), _upcast(h)
    dh = dh.to(a.dtype)
    start = a.new_zeros(a.shape[0], a.shape[2]) if initial_state is None else initial_state.to(a.dtype)
    slope = torch.zeros_like(start) if dfinal is None else dfinal.to(a.dtype)
    da, db = torch.empty_like(a), torch.empty_like(a)
    order = _order(a.shape[1], reverse)
    for i in reversed(range(len(order))):
        t = order[i]
        slope = db[:, t] = slope + dh[:, t]
        da[:, t] = slope * (h[:, order[i - 1]] if i else start)
        slope = a[:, t] * slope
    return da, db, slope.clone()


def _order(tokens, reverse):
    return range(tokens)[::-1] if reverse else range(tokens)
