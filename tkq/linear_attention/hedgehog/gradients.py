"""The gradients of Hedgehog's attention: a launch for those of queries, and one for those of keys and values."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.finish.launch import sum_rounded
from tkq.linear_attention.hedgehog.launch import (
    KEPT,
    OfKeys,
    OfQueries,
    Window,
    features,
    key_gradients,
    query_gradients,
    window_gradients,
)
from tkq.linear_attention.hedgehog.launch import Given as Forward
from tkq.linear_attention.launch import Given, launch
from tkq.reference.hedgehog import Gradients, Parts, hedgehog_backward


class Saved(NamedTuple):
    """What the gradients need of a forward: outputs; of each token 1 over its denominator, and the largest score in its
    window, (B, S, H) fp32; features, (B, S, H, 128), or with no columns where they were not kept; and what it took."""

    o: Tensor
    inverse: Tensor
    most: Tensor
    q_features: Tensor
    k_features: Tensor
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
    if saved.q_map.shape[2] != KEPT or not do.numel():
        o, inverse, _, _, _, *others = saved
        return hedgehog_backward(do, o, inverse, *others, parts=Parts(_before, _in_window, narrow=True))
    o, inverse, most, *kept, q, k, v, q_map, k_map, linear, window = saved
    # which float16 alone needs
    largest = inverse.amax(1) if do.dtype == torch.float16 else inverse.new_empty(inverse.shape[0], inverse.shape[2])
    linear, window = linear.contiguous(), window.contiguous()
    q_features, k_features = kept if kept[0].numel() else features(Forward(q, k, v, q_map, k_map, linear, window))
    # of keys, too: delta, and what the largest score of a window gets less
    dq, delta, share, factors, dq_map = query_gradients(OfQueries(
        q, k, v, do, o, q_map, q_features, k_features, inverse, most, largest, linear, window))
    dk = dv = dk_map = None
    if needs[1] or needs[2] or needs[4]:
        dk, dv, dk_map = key_gradients(OfKeys(
            k, q, v, do, k_map, k_features, q_features, inverse, most, delta, share, largest, linear, window))
    factors = factors.sum((1, 2)) if needs[5] or needs[6] else (None, None)
    maps = (sum_rounded(x.permute(1, 2, 0, 3), q_map.dtype) if needed else None
            for x, needed in ((dq_map, needs[3]), (dk_map, needs[4])))
    return Gradients(dq, dk, dv, *maps, *factors)


def _in_window(q, k, v, *numbers):
    """As `reference.hedgehog.in_window`."""
    gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    of_linear, of_window = window_gradients(Window(q, k, v, *numbers), *gradients).unbind(0)
    return of_linear, of_window, *gradients


def _before(q, k, v, reverse=False):
    """As `reference.hedgehog.before_window`, by the engine."""
    wide = torch.promote_types(v.dtype, torch.float32)
    if not q.numel():
        return torch.zeros(*q.shape[:3], v.shape[3], device=q.device, dtype=wide)
    return launch(Given(q, k, v, reverse=reverse, others=True), 1.0).o.to(wide)
