"""flash_attn's gradient formula, for ``ops.torch_op`` (tracing) and ``ops.eager_function`` (plain eager) alike."""
from typing import Any, NamedTuple

import torch

from tkq.attention.backward_ops import attention_backward


class Inputs(NamedTuple):
    """What the recorded op takes, in this order. left, right: -1 for no limit. Its outputs are o and lse, which it
    gives whether the caller asked for it or not."""

    q: Any
    k: Any
    v: Any
    sinks: Any
    causal: bool
    softmax_scale: Any
    left: int
    right: int
    softcap: float
    deterministic: bool


def setup(ctx, inputs, output):
    """Keep what the backward needs."""
    given = Inputs(*inputs)
    ctx.save_for_backward(given.q, given.k, given.v, given.sinks, *output)
    ctx.options = given[4:]
    ctx.set_materialize_grads(False)  # None, and not a tensor of zeros, for what was not used


def backward(ctx, do, dlse):
    """Gradients of exactly the inputs that need them."""
    q, k, v, sinks, o, lse = ctx.saved_tensors
    rest = (None,) * len(ctx.options)
    if do is None and dlse is None:
        return None, None, None, None, *rest
    causal, softmax_scale, left, right, softcap, deterministic = ctx.options
    do = torch.zeros_like(o) if do is None else do  # lse alone was used
    found = attention_backward(
        do, q, k, v, o, lse, dlse, causal=causal, softmax_scale=softmax_scale, window_size=(left, right),
        softcap=softcap, sinks=sinks, needs=tuple(ctx.needs_input_grad[:4]), deterministic=deterministic)
    return *(*found, None)[:4], *rest
