"""tkq.based: what PyTorch sees of Based."""
from typing import Optional

import torch
from torch import Tensor

from tkq.linear_attention.based.check import OP, check_call, options
from tkq.linear_attention.based.gradients import Saved, backward
from tkq.linear_attention.based.launch import Given, start
from tkq.linear_attention.check import check_layouts, for_tma, lowered
from tkq.reference import based as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_call_cache = CallCache()  # of `_forward`


def based(q: Tensor, k: Tensor, v: Tensor, scale: Optional[float] = None, use_norm: bool = True):
    """Causal linear attention with the Taylor series of exp, to the second order, in the place of softmax's: with
    s = scale * q[t] k[j] of two tokens of a head

        w[t, j] = 1 + s + s^2 / 2,   o[t] = sum of w[t, j] v[j] / sum of w[t, j] over j <= t      without use_norm the
                                                                                                 dividend alone

    A state over the 153 different products of none, one or two columns of k stands for all tokens of chunks before, so
    that time and memory grow with S, not with S^2. Computed in chunks of 64 tokens: products in 16 bits, sums of
    weights and the state in float32. Where heads are few, sequences are cut in segments, by two launches: equal within
    rounding.

    Args:
        q, k: (B, S, H, 16), bfloat16 or float16. S may be any length, also 0.
        v: (B, S, HV, V), as q, V a multiple of 16 from 32 to 128. HV is a multiple of H: HV / H neighbouring heads of v
            share one of q and k.
            The last dimension of q, k and v is contiguous; base and other strides are multiples of 16 bytes: slices of
            a packed tensor go in without a copy.
        scale: of products of q and k; 1 / 4 where not given.
        use_norm: divide by the sum of weights. None is below 1 / 2, so that nothing is added to it.

    Returns:
        o (B, S, HV, V), contiguous, of q's dtype. Sums of weights that float32 does not hold give NaN. In float16 the
        weights themselves, products of two columns of q or of k, and the mean over tokens of their products with v have
        to be within its range, too. NaN and infinities in v reach all tokens of their chunk of 64, those before them
        too.

    Raises:
        TypeError: q, k or v is no dense tensor of bf16 or fp16; scale is no number; use_norm is no bool; dtypes that
            differ.
        ValueError: a number that is not finite in float32; shapes that do not go together, devices that differ, strides
            or a base that TMA cannot take.
        NotImplementedError: q and k of other than 16 columns, a V that is not supported; more than 65535 sequences or
            heads.
        RuntimeError: a GPU other than Hopper.

    Differentiable once, in q, k and v; gradients are the same, bit for bit, in every run. Under torch.autocast q, k and
    v are cast. It is fla's parallel_based and fused_chunk_based, whose scale is 1 / sqrt(16) and which add 1e-6 to the
    sum of weights.

    Source: Arora et al., Simple linear attention language models balance the recall-throughput tradeoff, 2024. CPU
    tensors take ``tkq.reference.based``, by the same rules.

    Example::

        q, k = torch.randn(2, 2, 1024, 16, 16, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(2, 1024, 16, 64, device="cuda", dtype=torch.bfloat16)
        o = tkq.based(q, k, v)  # (2, 1024, 16, 64) bfloat16
    """
    traced = ops.traced()
    if traced or autocast.on():
        q, k, v = lowered(q, k, v)
    if not traced:
        found = _call_cache.take(q, k, v, scale, use_norm)
        if found is not None:
            return found[0]
    scale, use_norm = options(scale, use_norm)
    mode = ops.route(q, k, v)
    if mode == "direct":
        return (_forward if q.is_cuda else _cpu)(q, k, v, scale, use_norm)[0]
    if mode == "record":
        return _Recorded.apply(q, k, v, scale, use_norm)
    check.refuse_tangent(OP, q=q, k=k, v=v)
    check_call(q, k, v)  # the dispatcher's words name no argument
    return _op(q, k, v, scale, use_norm)[0]


def _scale(scale, q) -> float:
    return q.shape[3]**-0.5 if scale is None else float(scale)


def _forward(q, k, v, scale, use_norm):
    """(o, the sums of weights or None), of CUDA tensors."""
    check_call(q, k, v)
    check_layouts(OP, q, k, v)
    o, sums, call = start(Given(q, k, v, use_norm), _scale(scale, q))
    if call is not None:
        _call_cache.add((q, k, v, scale, use_norm), *call, (o, sums))
    return o, sums


# The ops return the sums always: an empty tensor without use_norm.


def _cuda(q: Tensor, k: Tensor, v: Tensor, scale: Optional[float], use_norm: bool) -> tuple[Tensor, Tensor]:
    found = _call_cache.take(q, k, v, scale, use_norm)
    if found is None:
        options(scale, use_norm)  # of the dispatcher, where no public function has looked at them
        found = _forward(q, k, v, scale, use_norm)
    o, sums = found
    return o, q.new_empty(0, dtype=torch.float32) if sums is None else sums


def _cpu(q, k, v, scale, use_norm):
    check_call(q, k, v)
    check_layouts(OP, q, k, v)
    o, sums = reference.based(q, k, v, scale, use_norm)
    sums = sums.contiguous() if use_norm else q.new_empty(0, dtype=torch.float32)
    return o.to(q.dtype).contiguous(), sums


def _fake(q, k, v, scale, use_norm):
    check_call(q, k, v)
    return q.new_empty(v.shape), q.new_empty(v.shape[:3] if use_norm else 0, dtype=torch.float32)


# ---- gradients ------------------------------------------------------------------------------------------------------


def _backward_cuda(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, sums: Tensor, scale: Optional[float],
                   use_norm: bool, need_q: bool, need_k: bool, need_v: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Empty ones for what is not wanted."""
    saved = Saved(q, k, v, *((o, sums) if use_norm else (None, None)))
    found = backward(saved, _scale(scale, q), for_tma(do), (need_q, need_k, need_v))
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _backward_cpu(do, q, k, v, o, sums, scale, use_norm, *needs):
    found = reference.based_backward(do, q, k, v, scale, use_norm)
    return tuple(x.to(q.dtype).contiguous() if needed else q.new_empty(0) for x, needed in zip(found, needs))


def _backward_fake(do, q, k, v, o, sums, scale, use_norm, *needs):
    return tuple(of.new_empty(of.shape) if needed else q.new_empty(0) for of, needed in zip((q, k, v), needs))


def _setup(ctx, inputs, output):
    *tensors, scale, use_norm = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.known = scale, use_norm
    ctx.set_materialize_grads(False)


def _record(ctx, *given):
    """The op in plain eager mode, past the dispatcher."""
    found = (_cuda if given[0].is_cuda else _cpu)(*given)
    _setup(ctx, given, found)
    return found[0]


def _back(ctx, do, dsums=None):
    needs = ctx.needs_input_grad[:3]
    if do is None:
        return (None,) * 5
    tensors = do, *ctx.saved_tensors
    call = _backward_op
    if ops.direct(*tensors):
        call = _backward_cuda if do.is_cuda else _backward_cpu
    found = call(*tensors, *ctx.known, *needs)
    return *(x if needed else None for x, needed in zip(found, needs)), None, None


_backward_op = ops.torch_op("based_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)
_op = ops.torch_op(OP, cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_back)
_Recorded = ops.eager_function("Based", forward=_record, backward=_back, of=OP)
