"""The gradients of flash_attn and flash_attn_varlen: what is saved, and the formula, in plain eager mode and traced."""
import torch

from tkq.attention.backward.ops import attention_backward
from tkq.attention.backward.varlen_ops import attention_varlen_backward

INPUTS = 4  # q, k, v, sinks: those that may have a gradient


def save(ctx, tensors, options: tuple, deterministic: bool, lengths: tuple = ()) -> None:
    """tensors: q, k, v, sinks, o, lse. options, lengths: as ``arguments.Options`` and, of varlen, ``Lengths``."""
    ctx.save_for_backward(*tensors, *lengths[:4])
    ctx.known = options, deterministic, lengths[4:]


def both(ctx, o, lse):
    """Two results, of which either may be left unused."""
    ctx.set_materialize_grads(False)  # None, and not a tensor of zeros, for what was not used
    return o, lse


def gradients(ctx, do, dlse):
    """(dq, dk, dv, dsinks), of exactly the inputs that need one."""
    if do is None and dlse is None:
        return (None,) * INPUTS
    q, k, v, sinks, o, lse, *sequences = ctx.saved_tensors
    if do is None:  # lse alone was used
        do = torch.zeros_like(o)
    options, deterministic, longest = ctx.known
    tensors, needs = (do, q, k, v, o, lse, dlse), tuple(ctx.needs_input_grad[:INPUTS])
    if sequences:
        return attention_varlen_backward(tensors, sinks, (*sequences, *longest), options,
                                         deterministic=deterministic, needs=needs)
    return attention_backward(tensors, sinks, options, deterministic=deterministic, needs=needs)


def setup(ctx, inputs, output):
    """Of the op: see ``tkq.attention.ops``. Its lse is there, as a gradient is asked for."""
    save(ctx, (*inputs[:INPUTS], *both(ctx, *output)), inputs[4:9], inputs[10])


def backward(ctx, do, dlse):
    """Of the op."""
    return *gradients(ctx, do, dlse), *(None,) * 7


def recorded_backward(ctx, do, dlse=None):
    """Of both eager functions, whose inputs are q, k, v, sinks and how they are to be called."""
    return *gradients(ctx, do, dlse), None


# ---- sequences of any length -----------------------------------------------------------------------


def setup_varlen(ctx, inputs, output):
    """Of the op: see ``tkq.attention.varlen_ops``."""
    save(ctx, (*inputs[:INPUTS], *both(ctx, *output)), inputs[10:15], inputs[16], inputs[4:10])


def backward_varlen(ctx, do, dlse):
    """Of the op."""
    return *gradients(ctx, do, dlse), *(None,) * 13
