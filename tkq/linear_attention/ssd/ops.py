"""tkq.mamba2_ssd: what PyTorch sees of Mamba-2's state space dual."""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq.linear_attention.check import Where, for_tma, lowered
from tkq.linear_attention.pools import Pools, may_be_written, put_rows, rows_of, written
from tkq.linear_attention.split.launch import start
from tkq.linear_attention.ssd import checkpoint_ops
from tkq.linear_attention.ssd.check import NAMES, OP, check_call, check_ssd_layouts, options
from tkq.linear_attention.ssd.forward import SsdSaved, forward
from tkq.linear_attention.ssd.gradients import SsdNeeds, backward
from tkq.reference import ssd as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_call_cache = CallCache()  # of `_forward`
TENSORS = len(NAMES)  # that a call takes; its options are behind them


def mamba2_ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor] = None,
               z: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, initial_states: Optional[Tensor] = None,
               dt_softplus: bool = False, dt_limit: tuple = (0.0, math.inf), return_final_states: bool = False, *,
               cu_seqlens: Optional[Tensor] = None, state_indices: Optional[Tensor] = None,
               checkpoint_every: Optional[int] = None):
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
        cu_seqlens: (M + 1,) int32 or int64, contiguous, rising from 0 to S: B is 1, and sequence m has the tokens
            cu_seqlens[m] to cu_seqlens[m + 1]. It may have none. States are then (M, H, P, N). They stay on the GPU:
            nothing waits for their values, and under a CUDA graph they may change between replays. Any values: a number
            below 0 counts as 0, one beyond S as S, and one below a number before it as that one, so its sequence is
            empty. Nothing outside the tensors is read or written. Tokens of no sequence, before the first or behind the
            last one, have y of 0 and a part in no gradient, whatever stands there; theirs are 0.
        state_indices: (M,) int32 or int64, contiguous, a number for each sequence (B, or those of cu_seqlens): sequence
            m begins with row state_indices[m] of initial_states, a pool (R, H, P, N), and the state behind its last
            token is written there, in the pool's dtype. Any values: where there is no such row, as with -1, the
            sequence begins with zeros and its state is not written. A row that two sequences have holds numbers of
            their states, and what they begin with is not defined. Without gradients.
        checkpoint_every: tokens, a multiple of 64: also return the state after each multiple of it, as prefix caches
            keep them. Without gradients, cu_seqlens and state_indices.

    Returns:
        y (B, S, H, P), contiguous, of x's dtype; with return_final_states the pair (y, states), states (B, H, P, N)
        float32, which the next call takes as initial_states; with state_indices it is initial_states itself. NaN and
        infinities in x reach all tokens of their chunk of 64, those before them too; not those of other sequences.
        With checkpoint_every last of all checkpoints (B, S // checkpoint_every, H, P, N) float32: [b, j] is the state
        behind token (j + 1) * checkpoint_every - 1 of sequence b.

    Raises:
        TypeError: x, B, C or z is no dense tensor of bf16 or fp16; dt, D or dt_bias is no dense tensor of bf16, fp16 or
            fp32; A is no dense tensor of fp32; initial_states is no dense tensor of fp32 or bf16; dt_softplus or
            return_final_states is no bool; dt_limit is no pair of numbers; cu_seqlens or state_indices is no dense
            tensor of int32 or int64; checkpoint_every is no int; dtypes that differ.
        ValueError: dt_limit has NaN, descends or is finite and infinite in float32; checkpoint_every is outside 1 to
            2^31 - 1; a checkpoint_every that is no multiple of 64; shapes that do not go together, devices that differ,
            strides or a base that TMA cannot take; state_indices without initial_states, or with ones whose elements
            share memory.
        NotImplementedError: a P or N that is not supported; more than 65535 sequences (65533 of cu_seqlens) or heads;
            state_indices with a tensor that requires a gradient; what checkpoint_every does not go with.
        RuntimeError: a GPU other than Hopper; state_indices with a pool that was made under torch.inference_mode,
            outside of it.

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
        checkpoint_ops.refuse_places(cu_seqlens, state_indices)
        dt_softplus, limit, return_final_states = options(dt_softplus, dt_limit, return_final_states)
        return checkpoint_ops.call(given, (dt_softplus, *limit), return_final_states, checkpoint_every)
    if state_indices is not None:
        dt_softplus, limits, return_final_states = options(dt_softplus, dt_limit, return_final_states)
        y = _pools.with_options(given, (dt_softplus, *limits, cu_seqlens, state_indices),
                                Where(cu_seqlens, state_indices))
        return (y, initial_states) if return_final_states else y
    if not traced:
        found = _call_cache.take(*given, dt_softplus, dt_limit, return_final_states, cu_seqlens, None)
        if found is not None:
            return found if return_final_states else found[0]
    dt_softplus, (low, high), return_final_states = options(dt_softplus, dt_limit, return_final_states)
    how = dt_softplus, low, high, return_final_states, cu_seqlens
    mode = ops.route(*given, cu_seqlens)
    if mode == "direct":
        y, states = (_forward if x.is_cuda else _cpu)(*given, *how)
    elif mode == "record":
        return _Recorded.apply(*given, *how)
    else:
        check.refuse_tangent(OP, **dict(zip(NAMES, given)))
        check_call(*given, where=Where(cu_seqlens))  # the dispatcher's words name no argument
        y, states = _op(*given, *how)
    return (y, states) if return_final_states else y


def _forward(x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, return_final_states,
             cu_seqlens=None, state_indices=None):
    """(y, the states or None), of CUDA tensors."""
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    check_call(*given, where=Where(cu_seqlens, state_indices))
    check_ssd_layouts(x, B, C, z)
    final = torch.float32 if return_final_states else None
    if state_indices is not None:
        may_be_written(OP, initial_states, NAMES[-1])
        final = initial_states.dtype
    saved = SsdSaved(*given, dt_softplus, (low, high), cu_seqlens)
    (y, states, *_), call = start(forward(saved, final)._replace(state_indices=state_indices), 1.0)
    if call is not None:
        _call_cache.add((*given, dt_softplus, (low, high), return_final_states, cu_seqlens, state_indices), *call,
                        (y, states))
    return y, states


# The ops return the states always: empty ones where none are asked for.


def _cuda(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor],
          dt_bias: Optional[Tensor], initial_states: Optional[Tensor], dt_softplus: bool, dt_low: float, dt_high: float,
          return_final_states: bool, cu_seqlens: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    found = _call_cache.take(*given, dt_softplus, (dt_low, dt_high), return_final_states, cu_seqlens, None)
    if found is None:
        # of the dispatcher, where no public function has looked at them
        dt_softplus, (dt_low, dt_high), _ = options(dt_softplus, (dt_low, dt_high), return_final_states)
        found = _forward(*given, dt_softplus, dt_low, dt_high, return_final_states, cu_seqlens)
    y, states = found
    return y, x.new_empty(0, dtype=torch.float32) if states is None else states


def _cpu(x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, return_final_states, cu_seqlens):
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    check_call(*given, where=Where(cu_seqlens))
    check_ssd_layouts(x, B, C, z)
    if x.is_meta:  # no lengths to look at
        return _fake(*given, dt_softplus, low, high, return_final_states, cu_seqlens)
    y, states = reference.mamba2_ssd(*given, dt_softplus, (low, high), cu_seqlens)
    states = states.contiguous().clone() if return_final_states else x.new_empty(0, dtype=torch.float32)
    return y.to(x.dtype), states


def _fake(x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, return_final_states, cu_seqlens):
    check_call(x, dt, A, B, C, D, z, dt_bias, initial_states, where=Where(cu_seqlens))
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = (count, *x.shape[2:], B.shape[3]) if return_final_states else 0
    return x.new_empty(x.shape), x.new_empty(states, dtype=torch.float32)


def _pool_cuda(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor], z: Optional[Tensor],
               dt_bias: Optional[Tensor], initial_states: Tensor, dt_softplus: bool, dt_low: float, dt_high: float,
               cu_seqlens: Optional[Tensor], state_indices: Tensor) -> Tensor:
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    y = _pool_replayed(*given, dt_softplus, dt_low, dt_high, cu_seqlens, state_indices)
    if y is None:
        dt_softplus, (dt_low, dt_high), _ = options(dt_softplus, (dt_low, dt_high), True)
        y, _ = _forward(*given, dt_softplus, dt_low, dt_high, True, cu_seqlens, state_indices)
        written(initial_states)
    return y


def _pool_replayed(*given):
    *tensors, dt_softplus, low, high, cu_seqlens, state_indices = given
    if check.made_in_inference(tensors[-1]):
        return None
    found = _call_cache.take(*tensors, dt_softplus, (low, high), True, cu_seqlens, state_indices)
    if found is None:
        return None
    written(tensors[-1])
    return found[0]


def _pool_cpu(*given):
    *tensors, dt_softplus, low, high, cu_seqlens, state_indices = given
    (x, _, _, B, C, _, z, _, pool), y = tensors, _pool_fake(*given)
    check_ssd_layouts(x, B, C, z)
    may_be_written(OP, pool, NAMES[-1])
    if x.is_meta:
        return y
    found, states = reference.mamba2_ssd(*tensors[:-1], rows_of(pool, state_indices), dt_softplus, (low, high),
                                         cu_seqlens)
    put_rows(pool, state_indices, states)
    written(pool)
    return found.to(x.dtype)


def _pool_fake(*given):
    *tensors, _, _, _, cu_seqlens, state_indices = given
    check_call(*tensors, where=Where(cu_seqlens, state_indices))
    return tensors[0].new_empty(tensors[0].shape)


# ---- gradients ------------------------------------------------------------------------------------------------------


def _backward_cuda(dy: Tensor, dstates: Optional[Tensor], x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
                   D: Optional[Tensor], z: Optional[Tensor], dt_bias: Optional[Tensor],
                   initial_states: Optional[Tensor], dt_softplus: bool, dt_low: float, dt_high: float, need_x: bool,
                   need_dt: bool, need_A: bool, need_B: bool, need_C: bool, need_D: bool, need_z: bool,
                   need_dt_bias: bool, need_initial: bool, cu_seqlens: Optional[Tensor]
                   ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty ones for what is not wanted."""
    needs = SsdNeeds(need_x, need_dt, need_A, need_B, need_C, need_D, need_z, need_dt_bias, need_initial)
    saved = SsdSaved(x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, (float(dt_low), float(dt_high)),
                     cu_seqlens)
    found = backward(saved, for_tma(dy), dstates, needs)
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


def _backward_cpu(dy, dstates, x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, *needs):
    *needs, cu_seqlens = needs
    given = x, dt, A, B, C, D, z, dt_bias, initial_states
    found = reference.mamba2_ssd_backward(dy, dstates, *given, dt_softplus, (low, high), cu_seqlens)
    return tuple(gradient.to(of.dtype).contiguous() if needed and gradient is not None else x.new_empty(0)
                 for gradient, of, needed in zip(found, given, needs))


def _backward_fake(dy, dstates, x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, low, high, *needs):
    return tuple(of.new_empty(of.shape) if needed and of is not None else x.new_empty(0)
                 for of, needed in zip((x, dt, A, B, C, D, z, dt_bias, initial_states), needs))


_backward_op = ops.torch_op("mamba2_ssd_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)


# ---- what autograd keeps --------------------------------------------------------------------------------------------


def _keep(ctx, given):
    *given, cu_seqlens = given
    ctx.save_for_backward(*given[:TENSORS], cu_seqlens)
    ctx.known = given[TENSORS:]
    ctx.set_materialize_grads(False)  # None, and not a tensor of zeros, for what was not used


def _setup(ctx, inputs, output):
    _keep(ctx, inputs)


def _record(ctx, *given):
    """The op in plain eager mode, past the dispatcher."""
    y, states = (_cuda if given[0].is_cuda else _cpu)(*given)
    _keep(ctx, given)
    return (y, states) if given[TENSORS + 3] else y


def _back(ctx, dy, dstates=None):
    (*given, cu_seqlens), needs = ctx.saved_tensors, ctx.needs_input_grad[:TENSORS]
    *how, return_final_states = ctx.known
    if not return_final_states:
        dstates = None
    if dy is None and dstates is None:
        return (None,) * (TENSORS + 5)
    if dy is None:  # the states alone were used
        dy = torch.zeros_like(given[0])
    call = _backward_op
    if ops.direct(dy, dstates, *given, cu_seqlens):
        call = _backward_cuda if dy.is_cuda else _backward_cpu
    found = call(dy, dstates, *given, *how, *needs, cu_seqlens)
    return *(x if needed else None for x, needed in zip(found, needs)), *(None,) * 5


_op = ops.torch_op(OP, cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_back)
_pool_op = ops.torch_op("mamba2_ssd_pool", cuda=_pool_cuda, cpu=_pool_cpu, fake=_pool_fake, of=OP,
                        mutates=("initial_states",))
_pools = Pools(OP, _pool_replayed, _pool_cuda, _pool_cpu, _pool_op,
               lambda *given: check_call(*given[:-1], where=given[-1]), NAMES)
_Recorded = ops.eager_function("Mamba2Ssd", forward=_record, backward=_back, of=OP)
