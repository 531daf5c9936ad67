"""The gradients of flash_attn and flash_attn_varlen: what is kept, and the formula, in plain eager mode and traced."""
from typing import NamedTuple, Optional

import torch

from tkq.attention.arguments import Options
from tkq.attention.backward_ops import attention_backward
from tkq.attention.backward_varlen_ops import Batch, attention_varlen_backward


class Facts(NamedTuple):
    """What the backward needs to know beside tensors. window_size: None on a side without a limit."""

    causal: bool
    softmax_scale: Optional[float]
    window_size: tuple
    softcap: float
    deterministic: bool


def facts(causal, softmax_scale, left, right, softcap, deterministic) -> Facts:
    """left, right: -1 on a side without a limit."""
    return Facts(causal, softmax_scale, (None if left < 0 else left, None if right < 0 else right), softcap,
                 deterministic)


def keep(ctx, q, k, v, sinks, o, lse, known: Facts) -> None:
    ctx.save_for_backward(q, k, v, sinks, o, lse)
    ctx.facts = known
    ctx.set_materialize_grads(False)  # None, and not a tensor of zeros, for what was not used


def gradients(ctx, do, dlse):
    """(dq, dk, dv, dsinks), of exactly the inputs that need one."""
    if do is None and dlse is None:
        return (None,) * 4
    q, k, v, sinks, o, lse = ctx.saved_tensors
    if do is None:  # lse alone was used
        do = torch.zeros_like(o)
    known = ctx.facts
    found = attention_backward(do, q, k, v, o, lse, dlse, causal=known.causal, softmax_scale=known.softmax_scale,
                               window_size=known.window_size, softcap=known.softcap, sinks=sinks,
                               needs=tuple(ctx.needs_input_grad[:4]), deterministic=known.deterministic)
    return found if sinks is not None else (*found, None)


def setup(ctx, inputs, output):
    """Of the op: see ``tkq.attention.ops``. Its lse is there, as a gradient is asked for."""
    q, k, v, sinks, causal, softmax_scale, left, right, softcap, _, deterministic = inputs
    keep(ctx, q, k, v, sinks, *output, facts(causal, softmax_scale, left, right, softcap, deterministic))


def backward(ctx, do, dlse):
    """Of the op."""
    return *gradients(ctx, do, dlse), *(None,) * 7


def recorded_backward(ctx, do, dlse):
    """Of the eager function, whose inputs are q, k, v, sinks and the facts."""
    return *gradients(ctx, do, dlse), None


# ---- sequences of any length -----------------------------------------------------------------------


def keep_varlen(ctx, tensors, batch: Batch, options: Options, deterministic: bool, output) -> None:
    """tensors: q, k, v, sinks. output: o, lse."""
    ctx.save_for_backward(*tensors, *output, *batch[:4])
    ctx.known = batch[4:], options, deterministic
    ctx.set_materialize_grads(False)


def varlen_gradients(ctx, do, dlse):
    """(dq, dk, dv, dsinks), of exactly the inputs that need one: the first four."""
    if do is None and dlse is None:
        return (None,) * 4
    q, k, v, sinks, o, lse, *sequences = ctx.saved_tensors
    lengths, options, deterministic = ctx.known
    return attention_varlen_backward(torch.zeros_like(o) if do is None else do, q, k, v, o, lse, dlse, sinks,
                                     Batch(*sequences, *lengths), options, deterministic=deterministic,
                                     needs=tuple(ctx.needs_input_grad[:4]))
