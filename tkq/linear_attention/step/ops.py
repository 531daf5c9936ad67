"""tkq.linear_attn_step and tkq.gated_delta_rule_step: what PyTorch sees of steps of linear attention."""
from typing import Optional

from torch import Tensor

from tkq.linear_attention.step.check import (
    DELTA,
    LINEAR,
    DeltaCall,
    LinearCall,
    changed,
    check_delta,
    check_linear,
    delta_options,
    linear_options,
    written,
)
from tkq.linear_attention.step.launch import Given, Options, results, start
from tkq.reference import linear_steps as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_linear_calls, _delta_calls = CallCache(), CallCache()  # of `_linear`, of `_delta`


def linear_attn_step(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], state: Tensor,
                     scale: Optional[float] = None, state_indices: Optional[Tensor] = None, *,
                     num_accepted_tokens: Optional[Tensor] = None, state_v_first: bool = False,
                     out: Optional[Tensor] = None) -> Tensor:
    """One token, or a few, of ``linear_attn`` for each of N sequences: decoding. States are in a pool, and are updated
    in place: with S the state of a sequence, from its first token to its last

        S = exp(g[t]) S + k[t] v[t]',   o[t] = scale * S' q[t]

    One launch, that reads a state once and writes it once; in float32.

    Args:
        q, k: (N, T, H, K), bfloat16 or float16, K a multiple of 16 from 32 to 256. T is usually 1; any number is
            allowed, also 0.
        v: (N, T, HV, V), as q, V a multiple of 16 from 32 to 256. HV is a multiple of H: HV / H neighbouring heads of v
            share one of q and k.
            The last dimension of q, k and v is contiguous; base and other strides are multiples of 16 bytes.
        g: natural logarithms of decays, float32: (N, T, HV), one for each token and head of v; (HV,), one for each
            head; (N, T, HV, K), one for each token, head and column of k, laid out as q; None: nothing decays.
        state: the pool, (M, HV, K, V), float32 or bfloat16, written to. Any strides that keep its elements apart. Fast
            are those with the matrix of each head contiguous, in one order or the other, all of them beginning at
            multiples of 16 bytes; others take single elements.
        scale: of o; 1 / sqrt(K) where not given.
        state_indices: (N,) int32 or int64: the row of the pool that has the state of a sequence. A sequence whose row
            the pool does not have, -1 for example, is skipped: its o is 0, and no state is read or written. No two
            sequences may have one row. None: sequence n has row n.
        num_accepted_tokens: for speculative decoding, (N,) int32 or int64, with state_indices (N, T): row
            state_indices[n, t] gets the state behind token t of sequence n, where the pool has it, and the state before
            the first token is the one in row state_indices[n, num_accepted_tokens[n] - 1], which the last call has put
            there: that is how many of its tokens were accepted. A sequence is skipped where that number is not from 1
            to T, or the pool does not have the row.
        state_v_first: states are (M, HV, V, K).
        out: where o is written, of v's shape and q's dtype, laid out as v. It shares no memory with the others.

    Returns:
        o (N, T, HV, V), contiguous, of q's dtype; or out.

    Raises:
        TypeError: q, k, v or out is no dense tensor of bf16 or fp16; g is no dense tensor of fp32; state is no dense
            tensor of fp32 or bf16; scale is no number; state_indices or num_accepted_tokens is no dense tensor of int32
            or int64; state_v_first is no bool; dtypes that differ.
        ValueError: a number that is not finite in float32; shapes that do not go together, devices that differ, strides
            or a base that accesses of 16 bytes cannot take, a pool or out whose elements share memory, with each other
            or with another tensor's.
        NotImplementedError: a tensor that requires a gradient, with gradients enabled: there is none; a K or V that is
            not supported; more than 65535 sequences or heads.
        RuntimeError: a GPU other than Hopper; a tensor made under torch.inference_mode that is written to outside.

    Values of state_indices and num_accepted_tokens are looked at on the GPU alone: nothing waits, and a CUDA graph may
    be replayed with others. Under torch.autocast q, k and v are cast.

    Source: Katharopoulos et al., 2020. CPU tensors take ``tkq.reference.linear_steps``, by the same rules.

    Example::

        q, k = torch.randn(2, 4, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(4, 1, 16, 128, device="cuda", dtype=torch.bfloat16)
        pool = torch.zeros(32, 16, 128, 128, device="cuda")
        g = -torch.rand(4, 1, 16, device="cuda")
        rows = torch.tensor([7, 3, -1, 30], device="cuda")  # the third sequence is skipped
        o = tkq.linear_attn_step(q, k, v, g, pool, None, rows)  # (4, 1, 16, 128) bfloat16
    """
    traced = ops.traced()
    if traced or autocast.on():
        q, k, v = autocast.lowered(q, k, v)
    if not traced and not (check.made_in_inference(state) or check.made_in_inference(out)):
        found = _linear_calls.take(q, k, v, g, state, scale, state_indices, num_accepted_tokens, state_v_first, out)
        if found is not None:
            changed(state, out)
            return found
    scale, state_v_first = linear_options(scale, state_v_first)
    call = LinearCall(q, k, v, g, state, scale, state_indices, num_accepted_tokens, state_v_first)
    if ops.direct(q, k, v, g, state, state_indices, num_accepted_tokens, out):
        return (_linear if q.is_cuda else _linear_cpu)(call, out)
    check.refuse_gradient(LINEAR, q=q, k=k, v=v, g=g, state=state, out=out)
    check_linear(call, out)  # the dispatcher's words name no argument
    if not traced:  # which has no addresses
        written(LINEAR, call, out)
    o = _linear_op(*call)
    return o if out is None else out.copy_(o)


def gated_delta_rule_step(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], beta: Tensor, state: Tensor,
                          scale: Optional[float] = None, use_qk_l2norm_in_kernel: bool = False,
                          state_indices: Optional[Tensor] = None, *, num_accepted_tokens: Optional[Tensor] = None,
                          state_v_first: bool = False, out: Optional[Tensor] = None) -> Tensor:
    """One token, or a few, of ``gated_delta_rule`` for each of N sequences: decoding. States are in a pool, and are
    updated in place: with S the state of a sequence, from its first token to its last

        u[t] = beta[t] (v[t] - exp(g[t]) S' k[t])
        S = exp(g[t]) S + k[t] u[t]',   o[t] = scale * S' q[t]

    One launch, that reads a state once and writes it once; in float32.

    Args:
        q, k, v: as ``linear_attn_step`` has them. Keys have the length 1, or are given it with use_qk_l2norm_in_kernel.
        g: natural logarithms of decays, float32, at most 0: (N, T, HV), one for each token and head of v (Gated
            DeltaNet); (N, T, HV, K), one for each column of k too, laid out as q (Kimi Delta Attention); None: nothing
            decays.
        beta: how much of a value is written, (N, T, HV), float32 or bfloat16, any strides.
        state: the pool, as ``linear_attn_step`` has it, written to.
        scale: of o; 1 / sqrt(K) where not given.
        use_qk_l2norm_in_kernel: each row x of q and k is divided by sqrt(|x|^2 + 1e-6), in float32.
        state_indices, num_accepted_tokens, state_v_first, out: as ``linear_attn_step`` has them.

    Returns:
        o (N, T, HV, V), contiguous, of q's dtype; or out.

    Raises:
        TypeError: q, k, v or out is no dense tensor of bf16 or fp16; g is no dense tensor of fp32; beta or state is no
            dense tensor of fp32 or bf16; scale is no number; use_qk_l2norm_in_kernel or state_v_first is no bool;
            state_indices or num_accepted_tokens is no dense tensor of int32 or int64; dtypes that differ.
        ValueError: a number that is not finite in float32; shapes that do not go together, devices that differ, strides
            or a base that accesses of 16 bytes cannot take, a pool or out whose elements share memory, with each other
            or with another tensor's.
        NotImplementedError: a tensor that requires a gradient, with gradients enabled: there is none; a K or V that is
            not supported; more than 65535 sequences or heads.
        RuntimeError: a GPU other than Hopper; a tensor made under torch.inference_mode that is written to outside.

    Under torch.autocast q, k and v are cast.

    Source: Yang et al., Gated Delta Networks, 2024; Schlag et al., 2021. CPU tensors take
    ``tkq.reference.linear_steps``, by the same rules.

    Example::

        q, k = torch.randn(2, 4, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
        v = torch.randn(4, 1, 16, 128, device="cuda", dtype=torch.bfloat16)
        g, beta = -torch.rand(4, 1, 16, device="cuda"), torch.rand(4, 1, 16, device="cuda")
        pool, rows = torch.zeros(32, 16, 128, 128, device="cuda"), torch.tensor([7, 3, -1, 30], device="cuda")
        o = tkq.gated_delta_rule_step(q, k, v, g, beta, pool, None, True, rows)  # (4, 1, 16, 128) bfloat16
    """
    traced = ops.traced()
    if traced or autocast.on():
        q, k, v = autocast.lowered(q, k, v)
    if not traced and not (check.made_in_inference(state) or check.made_in_inference(out)):
        found = _delta_calls.take(q, k, v, g, beta, state, scale, use_qk_l2norm_in_kernel, state_indices,
                                  num_accepted_tokens, state_v_first, out)
        if found is not None:
            changed(state, out)
            return found
    scale, use_qk_l2norm_in_kernel, state_v_first = delta_options(scale, use_qk_l2norm_in_kernel, state_v_first)
    call = DeltaCall(q, k, v, g, beta, state, scale, use_qk_l2norm_in_kernel, state_indices, num_accepted_tokens,
                     state_v_first)
    if ops.direct(q, k, v, g, beta, state, state_indices, num_accepted_tokens, out):
        return (_delta if q.is_cuda else _delta_cpu)(call, out)
    check.refuse_gradient(DELTA, q=q, k=k, v=v, g=g, beta=beta, state=state, out=out)
    check_delta(call, out)
    if not traced:
        written(DELTA, call, out)
    o = _delta_op(*call)
    return o if out is None else out.copy_(o)


def _scale(call) -> float:
    return call.q.shape[3]**-0.5 if call.scale is None else float(call.scale)


def _checked(op, call, out):
    """Strides and what autograd asks, of a call whose shapes have been looked at."""
    of_channels = call.g if call.g is not None and call.g.dim() == 4 else None  # read as q is
    check.rows_of_16_bytes(op, q=call.q, k=call.k, v=call.v, g=of_channels)
    written(op, call, out)


def _finish(call, out, o):
    changed(call.state, None)
    return o.to(call.q.dtype) if out is None else out.copy_(o)


# ---- linear attention -----------------------------------------------------------------------------------------------


def _linear(call, out=None):
    """Of CUDA tensors."""
    check_linear(call, out)
    _checked(LINEAR, call, out)
    q, k, v, g, state, _, indices, accepted, v_first = call
    o = results(v, out, q.dtype)
    launched = start(Given(q, k, v, o, g, None, state, indices, accepted), Options(v_first), _scale(call))
    if launched is not None:
        changed(state, out)
        _linear_calls.add((*call, out), *launched, o)
    return o


def _linear_cpu(call, out=None):
    check_linear(call, out)
    _checked(LINEAR, call, out)
    if call.q.is_meta:  # no rows to look at
        return results(call.v, out, call.q.dtype)
    return _finish(call, out, reference.linear_attn_step(*call))


def _linear_cuda_op(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], state: Tensor, scale: Optional[float],
                    state_indices: Optional[Tensor], num_accepted_tokens: Optional[Tensor],
                    state_v_first: bool) -> Tensor:
    call = LinearCall(q, k, v, g, state, scale, state_indices, num_accepted_tokens, state_v_first)
    found = None if check.made_in_inference(state) else _linear_calls.take(*call, None)
    if found is None:
        linear_options(scale, state_v_first)  # of the dispatcher, where no public function has looked at them
        return _linear(call)
    changed(state, None)
    return found


def _linear_fake(*call):
    call = LinearCall(*call)
    check_linear(call)
    return call.q.new_empty(call.v.shape)


# ---- the delta rule -------------------------------------------------------------------------------------------------


def _delta(call, out=None):
    """Of CUDA tensors."""
    check_delta(call, out)
    _checked(DELTA, call, out)
    q, k, v, g, beta, state, _, l2norm, indices, accepted, v_first = call
    o = results(v, out, q.dtype)
    launched = start(Given(q, k, v, o, g, beta, state, indices, accepted), Options(v_first, l2norm), _scale(call))
    if launched is not None:
        changed(state, out)
        _delta_calls.add((*call, out), *launched, o)
    return o


def _delta_cpu(call, out=None):
    check_delta(call, out)
    _checked(DELTA, call, out)
    if call.q.is_meta:
        return results(call.v, out, call.q.dtype)
    q, k, v, g, beta, state, scale, l2norm, *rows = call
    return _finish(call, out, reference.linear_attn_step(q, k, v, g, state, scale, *rows, beta, l2norm))


def _delta_cuda_op(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], beta: Tensor, state: Tensor,
                   scale: Optional[float], use_qk_l2norm_in_kernel: bool, state_indices: Optional[Tensor],
                   num_accepted_tokens: Optional[Tensor], state_v_first: bool) -> Tensor:
    call = DeltaCall(q, k, v, g, beta, state, scale, use_qk_l2norm_in_kernel, state_indices, num_accepted_tokens,
                     state_v_first)
    found = None if check.made_in_inference(state) else _delta_calls.take(*call, None)
    if found is None:
        delta_options(scale, use_qk_l2norm_in_kernel, state_v_first)
        return _delta(call)
    changed(state, None)
    return found


def _delta_fake(*call):
    call = DeltaCall(*call)
    check_delta(call)
    return call.q.new_empty(call.v.shape)


_linear_op = ops.torch_op(LINEAR, cuda=_linear_cuda_op, cpu=lambda *call: _linear_cpu(LinearCall(*call)),
                          fake=_linear_fake, mutates=("state",))
_delta_op = ops.torch_op(DELTA, cuda=_delta_cuda_op, cpu=lambda *call: _delta_cpu(DeltaCall(*call)), fake=_delta_fake,
                         mutates=("state",))
