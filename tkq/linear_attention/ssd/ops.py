"""tkq.mamba2_ssd: what PyTorch sees of Mamba-2's state space dual."""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq.linear_attention.check import for_tma, lowered
from tkq.linear_attention.split.launch import start
from tkq.linear_attention.ssd import checkpoint_ops
from tkq.linear_attention.ssd.check import NAMES, OP, check_call, check_ssd_layouts, options
from tkq.linear_attention.ssd.gradients import SsdNeeds, SsdSaved, backward, forward
from tkq.reference import ssd as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_call_cache = CallCache()  # of `_forward`
TENSORS = len(NAMES)  # that a call takes; its options are behind them


def mamba2_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor] = None,
               z: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, initial_states: Optional[Tensor] = None,
               dt_softplus: bool = False, dt_limit: tuple = (0.0, math.inf), return_final_states: bool = False,
               *, checkpoint_every: Optional[int] = None):
    """Mamba-2's state space dual: with a state h of P x N numbers for each head, from the first token to the last

        d[t] = clamp(softplus(dt[t] + dt_bias), dt_limit)
        h[t] = exp(d[t] A) h[t - 1] + d[t] x[t] B[t]',   y[t] = (h[t] C[t] + D x[t]) * silu(z[t])

    Computed in chunks of 64 tokens: products in 16 bits, step sizes, decays, sums and the state in float32; neither d
    nor d x is written.

    Args:
        x: (B, S, H, P), bfloat16 or float16, P a multiple of 16 from 32 to 256. S may be any length, also 0.
        dt: step sizes, (B, S, H), float32, bfloat16 or float16, any strides.
        A: (H,), float32, usually below 0. Above 0 the state grows: right as long as no factor within 64 tokens is
            infinite in float32, and what the state takes up with it fits x's type.
        B, C: (B, S, G, N), as x, N a multiple of 16 from 32 to 256. H is a multiple of G: H / G neighbouring heads of x
            share one of B and C.
            The last dimension of x, B, C and z is contiguous; base and other strides are multiples of 16 bytes: slices
            of a packed tensor go in without a copy.
        D: the skip connection's factors, (H,) or (H, P), float32, bfloat16 or float16. None: there is none.
        z: what y is gated by, as x. None: it is not.
        dt_bias: (H,), float32, bfloat16 or float16, added to dt. None: zeros.
        initial_states: the state before the first token, (B, H, P, N), float32 or bfloat16, any strides. None: zeros.
        dt_softplus: d is the softplus of dt + dt_bias, and not dt + dt_bias itself.
        dt_limit: the smallest and the largest d, behind softplus.
        return_final_states: also return the state behind the last token.
        checkpoint_every: tokens, a multiple of 64: also return the states behind every so many tokens, as prefix caches
            keep them. Without gradients.

    Returns:
        y (B, S, H, P), contiguous, of x's dtype; with return_final_states the pair (y, states), states (B, H, P, N)
        float32, which the next call takes as initial_states. NaN and infinities in x reach all tokens of their chunk of
        64, those before them too. With checkpoint_every last of all checkpoints (B, S // checkpoint_every, H, P, N)
        float32: [b, j] is the state behind token (j + 1) * checkpoint_every - 1 of sequence b.

    Raises:
        TypeError: x, B, C or z is no dense tensor of bf16 or fp16; dt, D or dt_bias is no dense tensor of bf16, fp16 or
            fp32; A is no dense tensor of fp32; initial_states is no dense tensor of fp32 or bf16; dt_softplus or
            return_final_states is no bool; dt_limit is no pair of numbers; checkpoint_every is no int; dtypes that
            differ.
        ValueError: dt_limit has NaN, descends or is finite and infinite in float32; checkpoint_every is outside 1 to
            2^31 - 1; a checkpoint_every that is no multiple of 64; shapes that do not go together, devices that differ,
            strides or a base that TMA cannot take.
        NotImplementedError: a P or N that is not supported; more than 65535 sequences or heads; checkpoint_every with a
            tensor that requires a gradient.
        RuntimeError: a GPU other than Hopper.

    Differentiable once, in all tensors, through y and the states; gradients are the same, bit for bit, in every run.
    Under torch.autocast x, B, C and z are cast. Names, layouts and the order of effects are those of mamba_ssm's
    mamba_chunk_scan_combined, without its chunk size.

    Source: Dao and Gu, Transformers are SSMs, 2024. CPU tensors take ``tkq.reference.ssd``, by the same rules.

    Example::

        x = torch.randn(2, 128, 8, 64, device="cuda", dtype=torch.bfloat16)
        B, C = torch.randn(2, 2, 128, 1, 128, device="cuda", dtype=torch.bfloat16)  # all heads share one of B and C
        dt, A = torch.randn(2, 128, 8, device="cuda", dtype=torch.bfloat16), -torch.rand(8, device="cuda")
        y = tkq.mamba2_ssd(x, dt, A, B, C, D=torch.ones(8, device="cuda"), dt_softplus=True)  # (2, 128, 8, 64) bfloat16
        y, states = tkq.mamba2_ssd(x, dt, A, B, C, dt_softplus=True, return_final_states=True)  # ..; (2, 8, 64, 128)
    """
    traced = ops.traced()
    if traced or autocast.on():
        x, B, C, z = lowered(x, B, C, z)
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    if checkpoint_every is not None:
        dt_softplus, limit, return_final_states = options(dt_softplus, dt_limit, return_final_states)
        return checkpoint_ops.call(given, (dt_softplus, *limit), return_final_states, checkpoint_every)
    if not traced:
        found = _call_cache.take(*given, dt_softplus, dt_limit, return_final_states)
        if found is not None:
            return found if return_final_states else found[0]
    dt_softplus, (low, high), return_final_states = options(dt_softplus, dt_limit, return_final_states)
    mode = ops.route(*given)
    if mode == "direct":
        y, states = (_forward if x.is_cuda else _cpu)(*given, dt_softplus, low, high, return_final_states)
    elif mode == "record":
        return _Recorded.apply(*given, dt_softplus, low, high, return_final_states)
    else:
        check.refuse_tangent(OP, **dict(zip(NAMES, given)))
        check_call(*given)  # the dispatcher's words name no argument
        y, states = _op(*given, dt_softplus, low, high, return_final_states)
    return (y, states) if return_final_states else y


def _forward(x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, return_final_states):
    """(y, the states or None), of CUDA tensors."""
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    check_call(*given)
    check_ssd_layouts(x, B, C, z)
    final = torch.float32 if return_final_states else None
    (y, states, *_), call = start(forward(SsdSaved(*given, dt_softplus, (low, high)), final), 1.0)
    if call is not None:
        _call_cache.add((*given, dt_softplus, (low, high), return_final_states), *call, (y, states))
    return y, states


# The ops return the states always: empty ones where none are asked for.


def _cuda(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor],
          dt_bias: Optional[Tensor], initial_states: Optional[Tensor], dt_softplus: bool, dt_low: float, dt_high: float,
          return_final_states: bool) -> tuple[Tensor, Tensor]:
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    found = _call_cache.take(*given, dt_softplus, (dt_low, dt_high), return_final_states)
    if found is None:
        # of the dispatcher, where no public function has looked at them
        dt_softplus, (dt_low, dt_high), _ = options(dt_softplus, (dt_low, dt_high), return_final_states)
        found = _forward(*given, dt_softplus, dt_low, dt_high, return_final_states)
    y, states = found
    return y, x.new_empty(0, dtype=torch.float32) if states is None else states


def _cpu(x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, return_final_states):
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    check_call(*given)
    check_ssd_layouts(x, B, C, z)
    y, states = reference.mamba2_ssd(*given, dt_softplus, (low, high))
    states = states.contiguous().clone() if return_final_states else x.new_empty(0, dtype=torch.float32)
    return y.to(x.dtype), states


def _fake(x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, return_final_states):
    check_call(x, dt, A, B, C, D, z, dt_bias, initial_states)
    states = (x.shape[0], *x.shape[2:], B.shape[3]) if return_final_states else 0
    return x.new_empty(x.shape), x.new_empty(states, dtype=torch.float32)


# ---- gradients ------------------------------------------------------------------------------------------------------


def _backward_cuda(dy: Tensor, dstates: Optional[Tensor], x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                   D: Optional[Tensor], z: Optional[Tensor], dt_bias: Optional[Tensor],
                   initial_states: Optional[Tensor], dt_softplus: bool, dt_low: float, dt_high: float, need_x: bool,
                   need_dt: bool, need_A: bool, need_B: bool, need_C: bool, need_D: bool, need_z: bool,
                   need_dt_bias: bool, need_initial: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                                                    Tensor, Tensor, Tensor]:
    """Empty ones for what is not wanted."""
    needs = SsdNeeds(need_x, need_dt, need_A, need_B, need_C, need_D, need_z, need_dt_bias, need_initial)
    saved = SsdSaved(x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, (float(dt_low), float(dt_high)))
    found = backward(saved, for_tma(dy), dstates, needs)
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


def _backward_cpu(dy, dstates, x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, *needs):
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    found = reference.mamba2_ssd_backward(dy, dstates, *given, dt_softplus, (low, high))
    return tuple(gradient.to(of.dtype).contiguous() if needed and gradient is not None else x.new_empty(0)
                 for gradient, of, needed in zip(found, given, needs))


def _backward_fake(dy, dstates, x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, *needs):
    return tuple(of.new_empty(of.shape) if needed and of is not None else x.new_empty(0)
                 for of, needed in zip((x, dt, A, B, C, D, z, dt_bias, initial_states), needs))


_backward_op = ops.torch_op("mamba2_ssd_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)


# ---- what autograd keeps --------------------------------------------------------------------------------------------


def _keep(ctx, given):
    ctx.save_for_backward(*given[:TENSORS])
    ctx.known = given[TENSORS:]
    ctx.set_materialize_grads(False)  # None, and not a tensor of zeros, for what was not used


def _setup(ctx, inputs, output):
    _keep(ctx, inputs)


def _record(ctx, *given):
    """The op in plain eager mode, past the dispatcher."""
    y, states = (_cuda if given[0].is_cuda else _cpu)(*given)
    _keep(ctx, given)
    return (y, states) if given[-1] else y


def _back(ctx, dy, dstates=None):
    given, needs, (*how, return_final_states) = ctx.saved_tensors, ctx.needs_input_grad[:TENSORS], ctx.known
    if not return_final_states:
        dstates = None
    if dy is None and dstates is None:
        return (None,) * (TENSORS + 4)
    if dy is None:  # the states alone were used
        dy = torch.zeros_like(given[0])
    call = _backward_op
    if ops.direct(dy, dstates, *given):
        call = _backward_cuda if dy.is_cuda else _backward_cpu
    found = call(dy, dstates, *given, *how, *needs)
    return *(x if needed else None for x, needed in zip(found, needs)), None, None, None, None


_op = ops.torch_op(OP, cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_back)
_Recorded = ops.eager_function("Mamba2Ssd", forward=_record, backward=_back, of=OP)
