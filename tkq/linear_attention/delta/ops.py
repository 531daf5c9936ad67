"""tkq.gated_delta_rule: what PyTorch sees of the delta rule."""
from typing import Optional

import torch
from torch import Tensor

from tkq.linear_attention.channels import launch as channels
from tkq.linear_attention.channels.bounded import launch as bounded
from tkq.linear_attention.channels.decays import numbers
from tkq.linear_attention.channels.launch import ChannelGiven
from tkq.linear_attention.check import (
    DELTA,
    Where,
    check_delta_call,
    check_layouts,
    columns_of,
    delta_every,
    delta_options,
    for_tma,
    lowered,
    turned,
)
from tkq.linear_attention.checkpoints import Checkpoints, cpu_results, no_checkpoints, of_packed, on_cpu
from tkq.linear_attention.delta.channel_gradients import backward as channels_backward
from tkq.linear_attention.delta.gradients import DeltaNeeds, DeltaSaved, backward
from tkq.linear_attention.delta.inputs import DeltaOptions, gates_in_kernel, in_kernel, prepared
from tkq.linear_attention.launch import Given, no_states
from tkq.linear_attention.pools import NAMES, Pools, laid_out, may_be_written, put_rows, rows_of, written
from tkq.linear_attention.recorded import Recorder, results
from tkq.linear_attention.split.launch import by_blocks, launch, start
from tkq.reference import linear_attention as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_call_cache, _l2norm_cache = CallCache(), CallCache()  # of `_forward`, without and with l2norm


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], beta: Tensor,
                     scale: Optional[float] = None, initial_state: Optional[Tensor] = None,
                     output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, *,
                     A_log: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None,
                     use_gate_in_kernel: bool = False, allow_neg_eigval: bool = False,
                     gate_lower_bound: Optional[float] = None,
                     cu_seqlens: Optional[Tensor] = None, state_indices: Optional[Tensor] = None,
                     state_v_first: bool = False, checkpoint_every: Optional[int] = None):
    """The gated delta rule (Gated DeltaNet; with a gate for each column of k Kimi Delta Attention, KDA; without gates
    DeltaNet), causal: with a state S of K x V numbers for each head of v, from the first token to the last

        u[t] = beta[t] (v[t] - exp(g[t]) S[t - 1]' k[t])
        S[t] = exp(g[t]) S[t - 1] + k[t] u[t]',   o[t] = scale * S[t]' q[t]

    What the state already gives for a key is taken off the value before it is written. Computed in chunks of 64
    tokens, whose triangular systems are solved in float32: products in 16 bits, sums, decays and the state in float32.

    Args:
        q, k: (B, S, H, K), bfloat16 or float16, K a multiple of 16 from 32 to 256, to 128 with a g of four dimensions.
            S may be any length, also 0. Keys are taken as they come: models normalise them to length 1; with longer
            ones, where beta times the square of the length is above 2, the state grows from token to token.
        v: (B, S, HV, V), as q, V a multiple of 16 from 32 to 256. HV is a multiple of H: HV / H neighbouring heads of v
            share one of q and k.
            The last dimension of q, k and v is contiguous; base and other strides are multiples of 16 bytes: slices of
            a packed tensor go in without a copy.
        g: natural logarithms of decays, float32: (B, S, HV), any strides; (B, S, HV, K), one for each column of k, that
            is each row of S, in memory as q is; None: nothing decays. At most 0; -inf forgets all that came before.
        beta: how much of a value is written, (B, S, HV), float32 or bfloat16, any strides: from 0 to 1, or to 2 where a
            model allows negative eigenvalues.
        scale: of o; 1 / sqrt(K) where not given.
        initial_state: the state before the first token, (B, HV, K, V), float32 or bfloat16, any strides. None: zeros.
        output_final_state: also return the state behind the last token.
        use_qk_l2norm_in_kernel: each head of q and k is divided by sqrt(sum(x^2) + 1e-6) and rounded, by `tkq.rmsnorm`
            ahead of the rule; q and k may then have any strides but for the last dimension's. In bfloat16, with a g of
            four dimensions and no gradients, by the rule's kernel itself, which does not round: last bits differ then.
        A_log, dt_bias: (HV,), bfloat16, float16 or float32, with use_gate_in_kernel; dt_bias (HV, K) with a g of four
            dimensions. dt_bias may be None: zeros.
        use_gate_in_kernel: the decays' logarithms are -exp(A_log) * softplus(g + dt_bias), in float32: g is what a
            model's projection gives, and may be bfloat16 or float16 too. Computed ahead of the rule, by PyTorch; of a
            g of four dimensions by a kernel, or in the rule's own: see gate_lower_bound.
        allow_neg_eigval: beta, from 0 to 1, is multiplied by 2.
        gate_lower_bound: with use_gate_in_kernel and a g of four dimensions, what no logarithm of a decay goes below:
            they are gate_lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). A number below 0; A_log may be None: zeros.
            From -5.198 on, with a g in bfloat16 whose strides are multiples of 16 bytes, where
            use_qk_l2norm_in_kernel has its lengths in the rule's kernel, K is 128 and V above 64, so are the gates.
        cu_seqlens, state_indices, state_v_first, checkpoint_every: packed sequences, a pool of states that is written
            in place, the order of states in memory, and checkpoints: as ``linear_attn``.

    Returns:
        o (B, S, HV, V), contiguous, of q's dtype; with output_final_state the pair (o, state), state (B, HV, K, V)
        float32, which the next call takes as initial_state; with state_indices it is initial_state itself. NaN and
        infinities in v reach all tokens of their chunk of 64, those before them too; not those of other sequences, nor
        those that decays have left nothing for, where a sequence is cut (docs/linear_attention.md).
        With checkpoint_every last of all the checkpoints of ``linear_attn``.

    Raises:
        TypeError: q, k or v is no dense tensor of bf16 or fp16; g is no dense tensor of fp32; beta or initial_state is
            no dense tensor of fp32 or bf16; scale or gate_lower_bound is no number; output_final_state,
            use_qk_l2norm_in_kernel, use_gate_in_kernel, allow_neg_eigval or state_v_first is no bool; A_log or dt_bias
            is no dense tensor of bf16, fp16 or fp32; cu_seqlens or state_indices is no dense tensor of int32 or int64;
            checkpoint_every is no int; dtypes that differ.
        ValueError: checkpoint_every is outside 1 to 2^31 - 1; a number that is not finite in float32; a
            checkpoint_every that is no multiple of 64; shapes that do not go together, devices that differ, strides or
            a base that TMA cannot take; state_indices without initial_state, or with one whose elements share memory;
            A_log, dt_bias or gate_lower_bound without use_gate_in_kernel, which needs a g, and A_log or
            gate_lower_bound; a gate_lower_bound that is not below 0, or with a g of other than four dimensions.
        NotImplementedError: a K or V that is not supported; more than 65535 sequences (65533 of cu_seqlens) or heads;
            state_indices with a tensor that requires a gradient; what checkpoint_every does not go with.
        RuntimeError: a GPU other than Hopper; state_indices with a pool that was made under torch.inference_mode,
            outside of it.

    Differentiable once, in q, k, v, g, beta, initial_state, A_log and dt_bias, through o and the state; results and
    gradients are the same, bit for bit, in every run. Under torch.autocast q, k and v are cast.

    Source: Yang et al., Gated Delta Networks, 2024; Schlag et al., 2021; Kimi Linear, 2025. CPU tensors take
    ``tkq.reference.linear_attention``, by the same rules.

    Example::

        q, k = torch.nn.functional.normalize(torch.randn(2, 2, 128, 4, 64, device="cuda"), dim=-1).bfloat16()
        v = torch.randn(2, 128, 8, 128, device="cuda", dtype=torch.bfloat16)  # two heads share one of q and k
        g, beta = -torch.rand(2, 128, 8, device="cuda"), torch.rand(2, 128, 8, device="cuda")
        o = tkq.gated_delta_rule(q, k, v, g, beta)  # (2, 128, 8, 128) bfloat16
        o, state = tkq.gated_delta_rule(q, k, v, g, beta, output_final_state=True)  # ..; (2, 8, 64, 128) float32
    """
    traced = ops.traced()
    if traced or autocast.on():
        q, k, v = lowered(q, k, v)
    if not (use_qk_l2norm_in_kernel is use_gate_in_kernel is allow_neg_eigval is False
            and A_log is dt_bias is gate_lower_bound is None):
        options = DeltaOptions(use_qk_l2norm_in_kernel, A_log, dt_bias, use_gate_in_kernel, allow_neg_eigval,
                               gate_lower_bound)
        l2norm = not traced and checkpoint_every is state_indices is None and in_kernel(
            q, k, v, g, beta, options, (initial_state, cu_seqlens))
        if l2norm:
            of = _with_gates if gates_in_kernel(q, v, g, options) else _of_any_length
            return of(q, k, v, g, beta, options, initial_state, scale, output_final_state, cu_seqlens, state_v_first)
        q, k, g, beta = prepared(q, k, v, g, beta, options, cu_seqlens)
    if checkpoint_every is not None:
        scale, output_final_state, state_v_first = delta_options(scale, output_final_state, state_v_first)
        return _checkpoints.call((q, k, v, g, beta, turned(DELTA, initial_state, state_v_first)), scale,
                                 output_final_state, Where(cu_seqlens, state_indices, state_v_first), checkpoint_every)
    if state_indices is not None:
        scale, output_final_state, state_v_first = delta_options(scale, output_final_state, state_v_first)
        o = _pools.call((q, k, v, g, beta, initial_state), scale, Where(cu_seqlens, state_indices, state_v_first))
        return (o, initial_state) if output_final_state else o
    initial_state = turned(DELTA, initial_state, state_v_first)
    if not traced:
        found = _call_cache.take(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens,
                                 state_v_first, None)
        if found is not None:
            return results(*found, output_final_state, state_v_first)
    scale, output_final_state, state_v_first = delta_options(scale, output_final_state, state_v_first)
    given = q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first
    mode = ops.route(q, k, v, g, beta, initial_state, cu_seqlens)
    if mode == "direct":
        o, state = (_forward if q.is_cuda else _cpu)(*given)
    elif mode == "record":
        found = _Recorded.apply(*given)
        o, state = found if output_final_state else (found, None)
    else:
        check.refuse_tangent(DELTA, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
        # the dispatcher's words name no argument
        check_delta_call(q, k, v, g, beta, initial_state, Where(cu_seqlens, None, state_v_first))
        o, state = _op(*given)
    return results(o, state, output_final_state, state_v_first)


def _of_any_length(q, k, v, g, beta, options, initial_state, scale, output_final_state, cu_seqlens, state_v_first):
    """The results of rows of q and k that are still to be divided by their lengths: see `in_kernel`."""
    q, k, g, beta = prepared(q, k, v, g, beta, options._replace(l2norm=False), cu_seqlens)
    initial_state = turned(DELTA, initial_state, state_v_first)
    found = _l2norm_cache.take(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first,
                              None)
    if found is None:
        scale, output_final_state, state_v_first = delta_options(scale, output_final_state, state_v_first)
        found = _forward(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first,
                         l2norm=True)
    return results(*found, output_final_state, state_v_first)


def _with_gates(q, k, v, g, beta, options, initial_state, scale, output_final_state, cu_seqlens, state_v_first):
    """The results of rows as `_of_any_length` has them, and of what gates are made of: see `gates_in_kernel`."""
    q, k, _, beta = prepared(q, k, v, None, beta, DeltaOptions(neg_eigval=options.neg_eigval), cu_seqlens)
    scale, output_final_state, state_v_first = delta_options(scale, output_final_state, state_v_first)
    initial_state = turned(DELTA, initial_state, state_v_first)
    check_delta_call(q, k, v, None, beta, initial_state, Where(cu_seqlens, None, state_v_first))
    check_layouts(DELTA, q, k, v)
    made = bounded.launch(bounded.BoundedGiven(
        q, k, v, g, beta, *numbers(g, options.A_log, options.dt_bias), float(options.lower_bound), initial_state,
        output_final_state, cu_seqlens, state_v_first), _scale(scale, q))
    return results(*made, output_final_state, state_v_first)


def _scale(scale, q) -> float:
    return q.shape[3]**-0.5 if scale is None else float(scale)


def _forward(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens=None, state_v_first=False,
             state_indices=None, l2norm=False):
    """(o, the state or None), of CUDA tensors. States are (.., K, V), whichever of these comes first in memory. l2norm:
    q and k are divided by their lengths, where g is of columns."""
    check_delta_call(q, k, v, g, beta, initial_state, Where(cu_seqlens, state_indices, state_v_first))
    check_layouts(DELTA, q, k, v, columns_of(g), names="qkvg")
    final = torch.float32 if output_final_state else None
    if state_indices is not None:
        may_be_written(DELTA, initial_state)
        final = initial_state.dtype
    if g is not None and g.dim() == 4:
        made, call = channels.start(ChannelGiven(q, k, v, g, beta, initial_state, final, v_first=state_v_first,
                                                 cu=cu_seqlens, state_indices=state_indices, l2norm=l2norm),
                                    _scale(scale, q))
    else:
        made, call = start(Given(q, k, v, g, beta, initial_state, final, cu=cu_seqlens, state_indices=state_indices,
                                 v_first=state_v_first), _scale(scale, q))
    o, state, *_ = made
    if call is not None:
        (_l2norm_cache if l2norm else _call_cache).add((
            q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first, state_indices),
            *call, (o, state))
    return o, state


# The ops return the state always: an empty one where none is asked for.


def _cuda(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], beta: Tensor, initial_state: Optional[Tensor],
          scale: Optional[float], output_final_state: bool, cu_seqlens: Optional[Tensor],
          state_v_first: bool) -> tuple[Tensor, Tensor]:
    given = q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first
    found = _call_cache.take(*given, None)
    if found is None:
        # of the dispatcher, where no public function has looked at them
        delta_options(scale, output_final_state, state_v_first)
        found = _forward(*given)
    o, state = found
    return o, q.new_empty(0, dtype=torch.float32) if state is None else state


def _saving(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first):
    """`_cuda`, and what `backward` needs of it, as `DeltaSaved` has it, or None; with gates of columns nothing."""
    if g is not None and g.dim() == 4:
        return _cuda(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first)
    check_delta_call(q, k, v, g, beta, initial_state, Where(cu_seqlens, None, state_v_first))
    check_layouts(DELTA, q, k, v, columns_of(g), names="qkvg")
    made = launch(by_blocks(Given(q, k, v, g, beta, initial_state, torch.float32 if output_final_state else None,
                                  updates=True, cu=cu_seqlens, v_first=state_v_first)), _scale(scale, q))
    state = q.new_empty(0, dtype=torch.float32) if made.state is None else made.state
    return made.o, state, made.dv, made.inverse, made.transfers, made.starts, made.reach


def _cpu(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first):
    check_delta_call(q, k, v, g, beta, initial_state, Where(cu_seqlens, None, state_v_first))
    check_layouts(DELTA, q, k, v, columns_of(g), names="qkvg")
    if q.is_meta:  # no lengths to look at
        return _fake(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first)
    o, state = reference.linear_attn(q, k, v, g, scale, initial_state, cu_seqlens, beta=beta)
    return o.to(q.dtype), laid_out(state, state_v_first) if output_final_state else q.new_empty(0, dtype=torch.float32)


def _fake(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first):
    check_delta_call(q, k, v, g, beta, initial_state, Where(cu_seqlens, None, state_v_first))
    state = no_states(q, v, cu_seqlens, state_v_first) if output_final_state else q.new_empty(0, dtype=torch.float32)
    return q.new_empty(v.shape), state


def _pool_cuda(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], beta: Tensor, initial_state: Tensor,
               scale: Optional[float], cu_seqlens: Optional[Tensor], state_indices: Tensor,
               state_v_first: bool) -> Tensor:
    given = q, k, v, g, beta, initial_state, scale, cu_seqlens, state_indices, state_v_first
    o = _pool_replayed(*given)
    if o is None:
        pool = turned(DELTA, initial_state, state_v_first)
        o, _ = _forward(q, k, v, g, beta, pool, scale, True, cu_seqlens, state_v_first, state_indices)
        written(initial_state)
    return o


def _pool_replayed(q, k, v, g, beta, initial_state, scale, cu_seqlens, state_indices, state_v_first):
    if check.made_in_inference(initial_state):
        return None
    pool = turned(DELTA, initial_state, state_v_first)
    found = _call_cache.take(q, k, v, g, beta, pool, scale, True, cu_seqlens, state_v_first, state_indices)
    if found is None:
        return None
    written(initial_state)
    return found[0]


def _pool_cpu(q, k, v, g, beta, initial_state, scale, cu_seqlens, state_indices, state_v_first):
    o = _pool_fake(q, k, v, g, beta, initial_state, scale, cu_seqlens, state_indices, state_v_first)
    check_layouts(DELTA, q, k, v, columns_of(g), names="qkvg")
    may_be_written(DELTA, initial_state)
    if q.is_meta:
        return o
    pool = turned(DELTA, initial_state, state_v_first)
    o, states = reference.linear_attn(q, k, v, g, scale, rows_of(pool, state_indices), cu_seqlens, beta=beta)
    put_rows(pool, state_indices, states)
    written(initial_state)
    return o.to(q.dtype)


def _pool_fake(q, k, v, g, beta, initial_state, scale, cu_seqlens, state_indices, state_v_first):
    pool, where = turned(DELTA, initial_state, state_v_first), Where(cu_seqlens, state_indices, state_v_first)
    check_delta_call(q, k, v, g, beta, pool, where)
    return q.new_empty(v.shape)


def _checkpoints_cuda(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], beta: Tensor,
                      initial_state: Optional[Tensor], scale: Optional[float], output_final_state: bool,
                      cu_seqlens: Optional[Tensor], state_v_first: bool,
                      checkpoint_every: int) -> tuple[Tensor, Tensor, Tensor]:
    check_delta_call(q, k, v, g, beta, initial_state, Where(cu_seqlens, None, state_v_first))
    check_layouts(DELTA, q, k, v)
    made = launch(Given(q, k, v, g, beta, initial_state, torch.float32 if output_final_state else None, cu=cu_seqlens,
                        v_first=state_v_first, checkpoint_every=checkpoint_every), _scale(scale, q))
    state = q.new_empty(0, dtype=torch.float32) if made.state is None else made.state
    return made.o, state, of_packed(made.checkpoints, cu_seqlens)


def _checkpoints_cpu(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first, every):
    made = _checkpoints_fake(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first,
                             every)
    check_layouts(DELTA, q, k, v)
    if q.is_meta:
        return made
    found = on_cpu(lambda q, k, v, g, beta, state: reference.linear_attn(q, k, v, g, scale, state, beta=beta),
                   (q, k, v, g, beta), initial_state, cu_seqlens, every)
    return cpu_results(found, q, output_final_state, state_v_first, cu_seqlens)


def _checkpoints_fake(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first, every):
    o, state = _fake(q, k, v, g, beta, initial_state, scale, output_final_state, cu_seqlens, state_v_first)
    return o, state, of_packed(no_checkpoints(q, v, every, state_v_first), cu_seqlens)


# ---- gradients ------------------------------------------------------------------------------------------------------


def _backward_cuda(do: Tensor, dstate: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor],
                   beta: Tensor, initial_state: Optional[Tensor], scale: Optional[float], need_q: bool, need_k: bool,
                   need_v: bool, need_g: bool, need_beta: bool, need_initial: bool,
                   cu_seqlens: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty ones for what is not wanted."""
    needs = need_q, need_k, need_v, need_g, need_beta, need_initial
    return _backward_eager(do, dstate, q, k, v, g, beta, initial_state, scale, *needs, cu_seqlens)


def _backward_eager(do, dstate, q, k, v, g, beta, initial_state, scale, *needs):
    """Likewise; behind `needs` and cu_seqlens what the forward has kept, if it has (see `_saving`)."""
    needs, (cu_seqlens, *kept) = DeltaNeeds(*needs[:6]), needs[6:]
    saved = DeltaSaved(q, k, v, g, beta, initial_state, cu_seqlens, *kept)
    of = channels_backward if g is not None and g.dim() == 4 else backward
    found = of(saved, _scale(scale, q), for_tma(do), dstate, needs)
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _backward_cpu(do, dstate, q, k, v, g, beta, initial_state, scale, *needs):
    *needs, cu_seqlens = needs
    given = q, k, v, g, beta, initial_state
    found = reference.gated_delta_rule_backward(do, dstate, *given, scale, cu_seqlens)
    return tuple(x.to(of.dtype).contiguous() if needed and x is not None else q.new_empty(0)
                 for x, of, needed in zip(found, given, needs))


def _backward_fake(do, dstate, q, k, v, g, beta, initial_state, scale, *needs):
    return tuple(of.new_empty(of.shape) if needed and of is not None else q.new_empty(0)
                 for of, needed in zip((q, k, v, g, beta, initial_state), needs))


_backward_op = ops.torch_op("gated_delta_rule_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)
_recorder = Recorder(6, _cuda, _cpu, _backward_eager, _backward_cpu, _backward_op, _saving)
_op = ops.torch_op(DELTA, cuda=_cuda, cpu=_cpu, fake=_fake, setup=_recorder.setup, backward=_recorder.backward)
_pool_op = ops.torch_op("gated_delta_rule_pool", cuda=_pool_cuda, cpu=_pool_cpu, fake=_pool_fake, of=DELTA,
                        mutates=("initial_state",))
_checkpoints_op = ops.torch_op("gated_delta_rule_checkpoints", cuda=_checkpoints_cuda, cpu=_checkpoints_cpu,
                               fake=_checkpoints_fake, of=DELTA)
_checkpoints = Checkpoints(DELTA, _checkpoints_cuda, _checkpoints_cpu, _checkpoints_op, delta_every, check_delta_call)
_pools = Pools(DELTA, _pool_replayed, _pool_cuda, _pool_cpu, _pool_op, check_delta_call, NAMES[6])
_Recorded = ops.eager_function("GatedDeltaRule", forward=_recorder.record, backward=_recorder.backward, of=DELTA)
