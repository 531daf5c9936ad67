"""The gradients of Hedgehog's attention: three launches of linear attention for what lies before the window, one for
what lies in it, and the maps' in PyTorch."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention.hedgehog.launch import window_gradients
from tkq.linear_attention.launch import Given, launch
from tkq.reference.hedgehog import Gradients, Parts, hedgehog_backward


def backward(do: Tensor, *given: Tensor) -> Gradients:
    """given: what the forward took, (q, k, v, q_map, k_map, linear_factor, window_factor).

    A gradient of what lies before the window is a linear attention of other chunks alone, with a chunk between: of
    features' gradients in the order of the tokens for queries, and in the reversed one for keys and values."""
    return hedgehog_backward(do, *given, parts=Parts(_before, window_gradients, narrow=True))


def _before(q, k, v, reverse=False):
    """As `reference.hedgehog.before_window`, by the engine."""
    wide = torch.promote_types(v.dtype, torch.float32)
    if not q.numel():
        return torch.zeros(*q.shape[:3], v.shape[3], device=q.device, dtype=wide)
    return launch(Given(q, k, v, reverse=reverse, others=True), 1.0).o.to(wide)
