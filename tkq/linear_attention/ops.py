"""tkq.linear_attn: what PyTorch sees of linear attention."""
from typing import Optional

import torch
from torch import Tensor

from tkq.linear_attention.channels import launch as channels
from tkq.linear_attention.channels.gradients import backward as channels_backward
from tkq.linear_attention.channels.launch import ChannelGiven
from tkq.linear_attention.check import OP, check_call, check_layouts, for_tma, lowered, options
from tkq.linear_attention.gradients import Needs, Saved, backward
from tkq.linear_attention.launch import Given, start
from tkq.linear_attention.recorded import Recorder
from tkq.reference import linear_attention as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_call_cache = CallCache()  # of `_forward`


def linear_attn(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor] = None, scale: Optional[float] = None,
                initial_state: Optional[Tensor] = None, output_final_state: bool = False):
    """Causal linear attention, with a state that may decay (retention, lightning attention, scalar gates; GLA, a gate
    for each column of k): with a state S of K x V numbers for each head of v, from the first token to the last

        S[t] = exp(g[t]) S[t - 1] + k[t] v[t]',   o[t] = scale * S[t]' q[t]      a g of columns is of the rows of S

    Computed in chunks of 64 tokens: products in 16 bits, sums, decays and the state in float32.

    Args:
        q, k: (B, S, H, K), bfloat16 or float16, K a multiple of 16 from 32 to 128. S may be any length, also 0.
        v: (B, S, HV, V), as q, V a multiple of 16 from 32 to 256. HV is a multiple of H: HV / H neighbouring heads of v
            share one of q and k.
            The last dimension of q, k and v is contiguous; base and other strides are multiples of 16 bytes: slices of
            a packed tensor go in without a copy.
        g: natural logarithms of decays, float32: (B, S, HV), one for each token and head of v; (HV,), one for each head
            at all tokens; (B, S, HV, K), one for each token, head and column of k, in memory as q is; None: nothing
            decays. Usually at most 0; -inf forgets all that came before. Above 0 the state grows: right as long as no
            factor within 64 tokens is infinite in float32, and what the state takes up with it fits q's type.
        scale: of o; 1 / sqrt(K) where not given.
        initial_state: the state before the first token, (B, HV, K, V), float32 or bfloat16, any strides. None: zeros.
        output_final_state: also return the state behind the last token.

    Returns:
        o (B, S, HV, V), contiguous, of q's dtype; with output_final_state the pair (o, state), state (B, HV, K, V)
        float32, which the next call takes as initial_state. NaN and infinities in v reach all tokens of their chunk of
        64, those before them too.

    Raises:
        TypeError: q, k or v is no dense tensor of bf16 or fp16; g is no dense tensor of fp32; scale is no number;
            initial_state is no dense tensor of fp32 or bf16; output_final_state is no bool; dtypes that differ.
        ValueError: a number that is not finite in float32; shapes that do not go together, devices that differ, strides
            or a base that TMA cannot take.
        NotImplementedError: a K or V that is not supported; more than 65535 sequences or heads.
        RuntimeError: a GPU other than Hopper.

    Differentiable once, in q, k, v, g and initial_state, through o and the state; gradients are the same, bit for bit,
    in every run. Under torch.autocast q, k and v are cast.

    Source: Katharopoulos et al., 2020; Sun et al., RetNet, 2023, and Yang et al., GLA, 2023, for the form in chunks.
    CPU tensors take ``tkq.reference.linear_attention``, by the same rules.

    Example::

        q, k = torch.randn(2, 2, 128, 4, 64, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(2, 128, 8, 128, device="cuda", dtype=torch.bfloat16)  # two heads share one of q and k
        g = -torch.rand(2, 128, 8, device="cuda")
        o = tkq.linear_attn(q, k, v, g)  # (2, 128, 8, 128) bfloat16
        o, state = tkq.linear_attn(q, k, v, g, output_final_state=True)  # ..; (2, 8, 64, 128) float32
    """
    traced = ops.traced()
    if traced or autocast.on():
        q, k, v = lowered(q, k, v)
    if not traced:
        found = _call_cache.take(q, k, v, g, initial_state, scale, output_final_state)
        if found is not None:
            return found if output_final_state else found[0]
    scale, output_final_state = options(scale, output_final_state)
    mode = ops.route(q, k, v, g, initial_state)
    if mode == "direct":
        o, state = (_forward if q.is_cuda else _cpu)(q, k, v, g, initial_state, scale, output_final_state)
    elif mode == "record":
        return _Recorded.apply(q, k, v, g, initial_state, scale, output_final_state)
    else:
        check.refuse_tangent(OP, q=q, k=k, v=v, g=g, initial_state=initial_state)
        check_call(q, k, v, g, initial_state)  # the dispatcher's words name no argument
        o, state = _op(q, k, v, g, initial_state, scale, output_final_state)
    return (o, state) if output_final_state else o


def _scale(scale, q) -> float:
    return q.shape[3]**-0.5 if scale is None else float(scale)


def _forward(q, k, v, g, initial_state, scale, output_final_state):
    """(o, the state or None), of CUDA tensors."""
    check_call(q, k, v, g, initial_state)
    check_layouts(OP, q, k, v, g)
    final = torch.float32 if output_final_state else None
    if g is not None and g.dim() == 4:
        made, call = channels.start(ChannelGiven(q, k, v, g, None, initial_state, final), _scale(scale, q))
    else:
        made, call = start(Given(q, k, v, _gates(g), None, initial_state, final), _scale(scale, q))
    o, state, *_ = made
    if call is not None:
        _call_cache.add((q, k, v, g, initial_state, scale, output_final_state), *call, (o, state))
    return o, state


# The ops return the state always: an empty one where none is asked for.


def _cuda(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], initial_state: Optional[Tensor],
          scale: Optional[float], output_final_state: bool) -> tuple[Tensor, Tensor]:
    given = q, k, v, g, initial_state, scale, output_final_state
    found = _call_cache.take(*given)
    if found is None:
        options(scale, output_final_state)  # of the dispatcher, where no public function has looked at them
        found = _forward(*given)
    o, state = found
    return o, q.new_empty(0, dtype=torch.float32) if state is None else state


def _gates(g):
    """Of heads: contiguous, as the kernel has them."""
    return g.contiguous() if g is not None and g.dim() == 1 else g


def _cpu(q, k, v, g, initial_state, scale, output_final_state):
    check_call(q, k, v, g, initial_state)
    check_layouts(OP, q, k, v, g)
    o, state = reference.linear_attn(q, k, v, g, scale, initial_state)
    state = state.clone() if output_final_state else q.new_empty(0, dtype=torch.float32)
    return o.to(q.dtype), state


def _fake(q, k, v, g, initial_state, scale, output_final_state):
    check_call(q, k, v, g, initial_state)
    state = (*v.shape[::2], q.shape[3], v.shape[3]) if output_final_state else 0
    return q.new_empty(v.shape), q.new_empty(state, dtype=torch.float32)


# ---- gradients ------------------------------------------------------------------------------------------------------


def _backward_cuda(do: Tensor, dstate: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor],
                   initial_state: Optional[Tensor], scale: Optional[float], need_q: bool, need_k: bool, need_v: bool,
                   need_g: bool, need_initial: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty ones for what is not wanted."""
    needs = Needs(need_q, need_k, need_v, need_g, need_initial)
    of = channels_backward if g is not None and g.dim() == 4 else backward
    found = of(Saved(q, k, v, _gates(g), initial_state), _scale(scale, q), for_tma(do), dstate, needs)
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _backward_cpu(do, dstate, q, k, v, g, initial_state, scale, *needs):
    given = q, k, v, g, initial_state
    found = reference.linear_attn_backward(do, dstate, *given, scale)
    return tuple(x.to(of.dtype).contiguous() if needed and x is not None else q.new_empty(0)
                 for x, of, needed in zip(found, given, needs))


def _backward_fake(do, dstate, q, k, v, g, initial_state, scale, *needs):
    return tuple(of.new_empty(of.shape) if needed and of is not None else q.new_empty(0)
                 for of, needed in zip((q, k, v, g, initial_state), needs))


_backward_op = ops.torch_op("linear_attn_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)
_recorder = Recorder(5, _cuda, _cpu, _backward_cuda, _backward_cpu, _backward_op)
_op = ops.torch_op(OP, cuda=_cuda, cpu=_cpu, fake=_fake, setup=_recorder.setup, backward=_recorder.backward)
_Recorded = ops.eager_function("LinearAttention", forward=_recorder.record, backward=_recorder.backward, of=OP)
