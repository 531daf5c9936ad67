"""The gradients of Hedgehog's attention: a launch for what lies in the window, and one each for what queries, and what
keys and values, have of all before it."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.finish.launch import row_dots
from tkq.linear_attention.hedgehog.launch import OfFeatures, key_gradients, query_gradients, window_gradients
from tkq.linear_attention.launch import Given, launch
from tkq.reference.hedgehog import Gradients, Parts, hedgehog_backward

OWN = 64  # columns of the maps that the features' kernels have


class Saved(NamedTuple):
    """What the gradients need of a forward: outputs, of each token 1 over its denominator, and what it took."""

    o: Tensor
    inverse: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_map: Tensor
    k_map: Tensor
    linear: Tensor
    window: Tensor


def backward(do: Tensor, saved: Saved, needs: tuple = (True,) * 7) -> tuple:
    """`reference.hedgehog.Gradients`, wide or of the tensors' types. needs: which are wanted, in that order; a gradient
    that is not wanted is None, or what was found on the way to others."""
    if saved.q_map.shape[2] != OWN or not do.numel():
        return hedgehog_backward(do, *saved, parts=Parts(_before, window_gradients, narrow=True))
    q, k, v, q_map, k_map, linear, _ = saved[2:]
    delta = row_dots(do, saved.o, torch.promote_types(do.dtype, torch.float32))
    of = window_gradients(q, k, v, do, saved.inverse, delta, saved.window)
    numbers = saved.inverse, delta, of.largest, linear.contiguous()
    dq_map = dlinear = dk_map = None
    if needs[0] or needs[3] or needs[5]:
        dq_map, dlinear = query_gradients(OfFeatures(q, k, do, v, q_map, k_map, *numbers), of.dq)
    if needs[1] or needs[2] or needs[4]:
        dk_map = key_gradients(OfFeatures(k, q, v, do, k_map, q_map, *numbers), of.dk, of.dv)
    sums = [x.sum(axes) if needed else None for x, axes, needed in zip(
        (dq_map, dk_map, dlinear, of.dwindow), (0, 0, (0, 1), (0, 1)), needs[3:])]
    return Gradients(of.dq, of.dk, of.dv, *sums)


def _before(q, k, v, reverse=False):
    """As `reference.hedgehog.before_window`, by the engine."""
    wide = torch.promote_types(v.dtype, torch.float32)
    if not q.numel():
        return torch.zeros(*q.shape[:3], v.shape[3], device=q.device, dtype=wide)
    return launch(Given(q, k, v, reverse=reverse, others=True), 1.0).o.to(wide)
