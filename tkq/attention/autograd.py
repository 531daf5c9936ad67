"""flash_attn's gradients: which calls have them, what is kept, and the formula, in plain eager mode and traced."""
from typing import NamedTuple, Optional

import torch

from tkq.attention.backward_ops import attention_backward

HEAD_DIMS = (64, 128)  # 256 compiles (tkq.attention.backward_wide), but has not run on a GPU as it is now


class Facts(NamedTuple):
    """What the backward needs to know beside tensors. window_size: None on a side without a limit."""

    causal: bool
    softmax_scale: Optional[float]
    window_size: tuple
    deterministic: bool


def facts(causal, softmax_scale, left, right, deterministic) -> Facts:
    """left, right: -1 on a side without a limit."""
    return Facts(causal, softmax_scale, (None if left < 0 else left, None if right < 0 else right), deterministic)


def check(q, v, sinks, softcap) -> None:
    """NotImplementedError, by name, for a call whose gradient no kernel computes."""
    if sinks is not None:
        raise NotImplementedError("flash_attn: a gradient was asked for, and there is none with sinks yet; "
                                  "call it under torch.no_grad()")
    if softcap:
        raise NotImplementedError(f"flash_attn: a gradient was asked for, and there is none with a softcap ({softcap}) "
                                  "yet; call it under torch.no_grad()")
    if q.shape[-1] not in HEAD_DIMS or v.shape[-1] != q.shape[-1]:
        allowed = ", ".join(map(str, HEAD_DIMS))
        raise NotImplementedError(f"flash_attn: a gradient was asked for at head_dim {q.shape[-1]} of q and "
                                  f"{v.shape[-1]} of v; those that have one are {allowed}, the same for q and v")


def keep(ctx, q, k, v, o, lse, known: Facts) -> None:
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.facts = known
    ctx.set_materialize_grads(False)  # None, and not a tensor of zeros, for what was not used


def gradients(ctx, do, dlse):
    """(dq, dk, dv), of exactly the inputs that need one."""
    if do is None and dlse is None:
        return None, None, None
    q, k, v, o, lse = ctx.saved_tensors
    if do is None:  # lse alone was used
        do = torch.zeros_like(o)
    known = ctx.facts
    return attention_backward(do, q, k, v, o, lse, dlse, causal=known.causal, softmax_scale=known.softmax_scale,
                              window_size=known.window_size, needs=tuple(ctx.needs_input_grad[:3]),
                              deterministic=known.deterministic)


def setup(ctx, inputs, output):
    """Of the op: see ``tkq.attention.ops``. Its lse is there, as a gradient is asked for."""
    q, k, v, _, causal, softmax_scale, left, right, _, _, deterministic = inputs
    keep(ctx, q, k, v, *output, facts(causal, softmax_scale, left, right, deterministic))


def backward(ctx, do, dlse):
    """Of the op."""
    return *gradients(ctx, do, dlse), *(None,) * 8


def recorded_backward(ctx, do, dlse):
    """Of the eager function, whose inputs are q, k, v and the facts."""
    return *gradients(ctx, do, dlse), None
