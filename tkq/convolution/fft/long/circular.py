"""Circular convolutions of tokens that are too many to be written twice: two of several passes, whose results are
float32 and are added by PyTorch.

A tap j takes v[t - j] from before a token, which is causal; or v[t - j + L] from around the circle, which is what a tap
at L - j of a mirrored filter takes from behind it.
"""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.convolution.fft.long import launch as long
from tkq.convolution.fft.tensors import Given, filter_of


def forward(g: Given, conjugate: bool) -> Tensor:
    """y, contiguous; conjugate: of the filter's mirror image. The two are added and multiplied by a gate in float32,
    and rounded once."""
    B, H, L = g.u.shape
    before, y = filter_of(g), torch.empty(g.u.shape, dtype=g.u.dtype, device=g.u.device)
    before = torch.nn.functional.pad(before, (0, L - before.shape[1]))
    around = before.flip(1).roll(1, 1)
    # A tap at 0 is the token's own, which `before` has.
    around[:, 0] = 0
    for heads in long.slices(H, 2 * 4 * B * L):
        u, pre, post = (t if t is None else t[:, heads] for t in (g.u, g.pre, g.post))
        total, other = (long.forward(Given(u, taps[heads], None, True, pre, None, g.split), mirrored, torch.float32)
                        for taps, mirrored in ((before, conjugate), (around, not conjugate)))
        total += other
        if post is not None:
            total *= post
        y[:, heads] = total
    return y


def filter_gradient(g: Given, dy: Tensor) -> Tensor:
    """(H, L) float32: of a tap j the sum of what tokens are from j before them on, and of what they are from L - j
    behind them on."""
    L = g.u.shape[2]
    found = long.filter_gradient(Given(g.u, g.k, None, True, g.pre, g.post, g.split), dy)[:, :L]
    around = long.filter_gradient(Given(dy, g.k, None, True, g.post, g.pre, g.split), g.u)[:, :L]
    found[:, 1:] += around[:, 1:].flip(1)
    return found
