"""flash_attn's gradient formula, for ``ops.torch_op`` (tracing) and ``ops.eager_function`` (plain eager) alike."""
import torch

from tkq.attention.backward_ops import attention_backward


def setup(ctx, inputs, output):
    """Keep what the backward needs. inputs: q, k, v, causal, softmax_scale, return_lse; output: o and lse, which is
    there whether the caller asked for it or not."""
    q, k, v, ctx.causal, ctx.softmax_scale, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # None, and not a tensor of zeros, for what was not used


def backward(ctx, do, dlse):
    """Gradients of exactly the inputs that need them."""
    q, k, v, o, lse = ctx.saved_tensors
    needs = tuple(ctx.needs_input_grad[:3])
    if do is None and dlse is None:
        return (None,) * 6
    if do is None:  # lse alone was used
        do = torch.zeros_like(o)
    found = attention_backward(do, q, k, v, o, lse, dlse, causal=ctx.causal, softmax_scale=ctx.softmax_scale,
                               needs=needs)
    return *found, None, None, None
