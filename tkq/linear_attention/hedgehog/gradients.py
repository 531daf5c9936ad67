"""The gradients of Hedgehog's attention: three launches of linear attention for what lies before the window, and the
rest in PyTorch, by blocks."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention.launch import Given, launch
from tkq.reference.hedgehog import Gradients, hedgehog_backward


def backward(do: Tensor, *given: Tensor) -> Gradients:
    """Wide. given: what the forward took, (q, k, v, q_map, k_map, linear_factor, window_factor).

    A gradient of what lies before the window is a linear attention of other chunks alone, with a chunk between: of
    features' gradients in the order of the tokens for queries, and in the reversed one for keys and values."""
    return hedgehog_backward(do, *given, before=lambda *of: _before(given[0].dtype, *of))


def _before(dtype, q, k, v, reverse=False):
    """As `reference.hedgehog.before`, by the engine: operands of 16 bits. Each is divided by a power of 2 of each head,
    by which no number is above 1: fp16 then has room for the sum, and for weights that are all small."""
    if not q.numel():
        return torch.zeros(*q.shape[:3], v.shape[3], device=q.device, dtype=torch.float32)
    powers = [_power_above(x) for x in (q, k, v)]
    q, k, v = (torch.div(x, power).to(dtype) for x, power in zip((q, k, v), powers))
    o = launch(Given(q, k, v, reverse=reverse, others=True), 1.0).o
    return o.float() * powers[0] * powers[1] * powers[2]


def _power_above(x):
    """Of each sequence and head, (B, 1, H, 1): a power of 2 above all numbers."""
    _, exponent = torch.frexp(x.abs().amax((1, 3), keepdim=True))
    return torch.ldexp(torch.ones_like(x[:, :1, :, :1]), exponent)
