"""tkq.scan: what PyTorch sees."""
from typing import Optional

import torch
from torch import Tensor

from tkq.recurrence import launch
from tkq.recurrence.check import OP, Call, check_call, options
from tkq.reference import recurrence as reference
from tkq.runtime.call import check, ops
from tkq.runtime.call.replay import CallCache

_calls = CallCache()  # of `_cuda`


def scan(a: Tensor, b: Tensor, initial_state: Optional[Tensor] = None, reverse: bool = False,
         output_final_state: bool = False):
    """A linear recurrence along the tokens, each channel by itself:

        h[t] = a[t] h[t - 1] + b[t]

    The state is float32 whatever the tensors are, and but for the segments below all comes of one pass over memory,
    forward and backward.

    Contiguous channels: one rounded multiply-add from token to token, in order, so two calls of which the second
    continues from the first's final state give the bits of one. Nothing is multiplied ahead, so a of any size is taken
    as it is, 0, negative and above 1 too.

    Contiguous tokens: up to 8 neighbours are joined in order, then these by the products of their a, in float32 and
    always in the same order. In fp32 a product is two numbers, so that results are as exact as by steps in order, but
    other bits; in 16 bits it is one, and what n equal a make is off by up to n roundings of float32. A product beyond
    float32 counts as its largest number: a state of 0 stays 0 whatever a is, but one that is tiny may be taken to grow
    less than it does.

    Only of few columns and many tokens, where a scan would leave the GPU idle, segments of the tokens run side by side,
    and are joined by the products of their a, likewise: with contiguous channels where B C is up to 512 in fp32, 1024
    in 16 bits, and T 8192 or more; with contiguous tokens where B C is below 66 and T 65536 or more.

    Args:
        a, b: (B, T, C), bf16, fp16 or fp32, both of one type; T of any length, also 0. Fast are tensors with contiguous
            channels whose tokens are any distance apart, and those with contiguous tokens, a (B, C, T) transposed.
            Others are copied first; b is, where a lies otherwise.
        initial_state: (B, C), h before the first token; bf16, fp16 or fp32; None: zeros.
        reverse: from the last token to the first: h[t] = a[t] h[t + 1] + b[t]; initial_state is behind the last token.
        output_final_state: also return the state behind the last token that the scan takes.

    Returns:
        h (B, T, C) of a's type: contiguous, or contiguous along tokens as a is. With output_final_state the pair (h,
        state), the state (B, C) float32.

    Raises:
        TypeError: a, b or initial_state is no dense tensor of bf16, fp16 or fp32; reverse or output_final_state is no
            bool; a and b that differ in type.
        ValueError: shapes that do not go together, devices that differ.
        NotImplementedError: more than 2^30 sequences times channels.
        RuntimeError: a GPU other than Hopper.

    Differentiable once, in a, b and initial_state; gradients are the same, bit for bit, in every run. They are made of
    a and of h as it was rounded.

    Source: Martin and Cundy, Parallelizing linear recurrent neural nets over sequence length, 2018. CPU tensors take
    ``tkq.reference.recurrence``, by the same rules.

    Example::

        a = torch.rand(2, 64, 512, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(2, 64, 512, device="cuda", dtype=torch.bfloat16)
        h, state = tkq.scan(a, b, None, False, True)  # (2, 64, 512) bfloat16; (2, 512) float32
    """
    if not ops.traced():
        found = _calls.take(a, b, initial_state, reverse, output_final_state)
        if found is not None:
            return found if output_final_state else found[0]
    reverse, output_final_state = options(reverse, output_final_state)
    given = a, b, initial_state, reverse, output_final_state
    mode = ops.route(a, b, initial_state)
    if mode == "direct":
        h, final = (_cuda if a.is_cuda else _cpu)(*given)
    elif mode == "record":
        h, final = _Recorded.apply(*given)
    else:
        check.refuse_tangent(OP, a=a, b=b, initial_state=initial_state)
        check_call(Call(a, b, initial_state))  # the dispatcher's words name no argument
        h, final = _op(*given)
    return (h, final) if output_final_state else h


# ---- forward: an empty final state where none is asked for ----------------------------------------------------------


def _cuda(a: Tensor, b: Tensor, initial_state: Optional[Tensor], reverse: bool,
          output_final_state: bool) -> tuple[Tensor, Tensor]:
    given = a, b, initial_state, reverse, output_final_state
    found = _calls.take(*given)
    if found is None:
        options(reverse, output_final_state)  # where no public function has looked at them
        check_call(Call(a, b, initial_state))
        *found, call = launch.forward(a, b, initial_state, reverse, output_final_state)
        if call is not None:
            _calls.add(given, *call, tuple(found))
    h, final = found
    return h, a.new_empty(0) if final is None else final


def _cpu(a, b, initial_state, reverse, output_final_state):
    h, final = _fake(a, b, initial_state, reverse, output_final_state)
    if not a.is_meta:  # which has no numbers to look at
        found = reference.scan(a, b, initial_state, reverse)
        h.copy_(found[0])
        if output_final_state:
            final.copy_(found[1])
    return h, final


def _fake(a, b, initial_state, reverse, output_final_state):
    check_call(Call(a, b, initial_state))
    B, _, C = a.shape
    h = launch.result_like(a, launch.along_time(a))
    return h, a.new_empty(B, C, dtype=torch.float32) if output_final_state else a.new_empty(0)


# ---- gradients: empty ones of what is not wanted --------------------------------------------------------------------


def _backward_cuda(dh: Tensor, dfinal: Optional[Tensor], a: Tensor, h: Optional[Tensor],
                   initial_state: Optional[Tensor], reverse: bool, need_a: bool, need_b: bool,
                   need_state: bool) -> tuple[Tensor, Tensor, Tensor]:
    wanted = launch.Wanted(need_a, need_b, need_state)
    da, db, dstate = launch.backward(dh, dfinal, a, h, initial_state, reverse, wanted)
    dstate = dstate if dstate is None else dstate.to(initial_state.dtype)
    return tuple(a.new_empty(0) if g is None else g for g in (da, db, dstate))


def _backward_cpu(dh, dfinal, a, h, initial_state, reverse, *needs):
    found = reference.scan_backward(dh, dfinal, a, dh if h is None else h, initial_state, reverse)
    results = _backward_fake(dh, dfinal, a, h, initial_state, reverse, *needs)
    for result, gradient, needed in zip(results, found, needs, strict=True):
        if needed:
            result.copy_(gradient)
    return results


def _backward_fake(dh, dfinal, a, h, initial_state, reverse, need_a, need_b, need_state):
    like = lambda wanted: launch.result_like(a, launch.along_time(a)) if wanted else a.new_empty(0)
    return like(need_a), like(need_b), initial_state.new_empty(initial_state.shape) if need_state else a.new_empty(0)


def _setup(ctx, inputs, output):
    a, _, initial_state, reverse, _ = inputs
    needs_a = ctx.needs_input_grad[0]
    ctx.save_for_backward(a, output[0] if needs_a else None, initial_state)
    ctx.reverse = reverse
    ctx.set_materialize_grads(False)


def _record(ctx, *given):
    """The op in plain eager mode, past the dispatcher."""
    found = (_cuda if given[0].is_cuda else _cpu)(*given)
    _setup(ctx, given, found)
    return found


def _back(ctx, dh, dfinal=None):
    a, h, state = ctx.saved_tensors
    if dfinal is not None and not dfinal.numel() and a.shape[0] * a.shape[2]:
        dfinal = None
    if dh is None and dfinal is None:
        return (None,) * 5
    if dh is None:
        dh = a.new_zeros(()).expand(a.shape)
    needs = ctx.needs_input_grad[:3]
    call = _backward_op
    if ops.direct(dh, dfinal, a, h, state):
        call = _backward_cuda if dh.is_cuda else _backward_cpu
    found = call(dh, dfinal, a, h, state, ctx.reverse, *needs)
    return *(g if needed else None for g, needed in zip(found, needs, strict=True)), None, None


_backward_op = ops.torch_op("scan_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)
_op = ops.torch_op(OP, cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_back)
_Recorded = ops.eager_function("Scan", forward=_record, backward=_back, of=OP)
