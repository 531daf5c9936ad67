"""tkq.linear_attn: what PyTorch sees of linear attention."""
from typing import Optional

import torch
from torch import Tensor

from tkq.linear_attention.channels import halves
from tkq.linear_attention.channels import launch as channels
from tkq.linear_attention.channels.gradients import backward as channels_backward
from tkq.linear_attention.channels.launch import ChannelGiven
from tkq.linear_attention.check import (
    OP,
    Where,
    check_call,
    check_layouts,
    columns_of,
    every_option,
    for_tma,
    lowered,
    options,
    turned,
)
from tkq.linear_attention.checkpoints import Checkpoints, cpu_results, no_checkpoints, of_packed, on_cpu
from tkq.linear_attention.gradients import Needs, Saved, backward
from tkq.linear_attention.launch import Given, no_states
from tkq.linear_attention.pools import NAMES, Pools, laid_out, may_be_written, put_rows, rows_of, written
from tkq.linear_attention.recorded import Recorder, results
from tkq.linear_attention.spec import NARROW
from tkq.linear_attention.split.launch import launch, start
from tkq.reference import linear_attention as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_call_cache = CallCache()  # of `_forward`


def linear_attn(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor] = None, scale: Optional[float] = None,
                initial_state: Optional[Tensor] = None, output_final_state: bool = False, *,
                cu_seqlens: Optional[Tensor] = None, state_indices: Optional[Tensor] = None,
                state_v_first: bool = False, checkpoint_every: Optional[int] = None):
    """Causal linear attention, with a state that may decay (retention, lightning attention, scalar gates; GLA, a gate
    for each column of k): with a state S of K x V numbers for each head of v, from the first token to the last

        S[t] = exp(g[t]) S[t - 1] + k[t] v[t]',   o[t] = scale * S[t]' q[t]      a g of columns is of the rows of S

    Computed in chunks of 64 tokens: products in 16 bits, sums, decays and the state in float32.

    Args:
        q, k: (B, S, H, K), bfloat16 or float16, K a multiple of 16 from 32 to 256. S may be any length, also 0.
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
        cu_seqlens: (N + 1,) int32 or int64, contiguous, rising from 0 to S: B is 1, and sequence n has the tokens
            cu_seqlens[n] to cu_seqlens[n + 1]. It may have none. States are then (N, HV, K, V). They stay on the GPU:
            nothing waits for their values, and under a CUDA graph they may change between replays. Any values: a number
            below 0 counts as 0, one beyond S as S, and one below a number before it as that one, so its sequence is
            empty. Nothing outside the tensors is read or written. Tokens of no sequence, before the first or behind the
            last one, have o of 0 and a part in no gradient, whatever stands there; theirs are 0.
        state_indices: (N,) int32 or int64, contiguous, a number for each sequence (B, or those of cu_seqlens): sequence
            n begins with row state_indices[n] of initial_state, a pool (M, HV, K, V), and the state behind its last
            token is written there, in the pool's dtype. Any values: where there is no such row, as with -1, the
            sequence begins with zeros and its state is not written. A row that two sequences have holds numbers of
            their states, and what they begin with is not defined. Without gradients.
        state_v_first: states are (.., V, K), those that come in and those that go out; these contiguous.
        checkpoint_every: tokens, a multiple of 64: also return the state after each multiple of it, as prefix caches
            keep them. Without gradients, state_indices and a g of four dimensions.

    Returns:
        o (B, S, HV, V), contiguous, of q's dtype; with output_final_state the pair (o, state), state (B, HV, K, V)
        float32, which the next call takes as initial_state; with state_indices it is initial_state itself. NaN and
        infinities in v reach all tokens of their chunk of 64, those before them too; not those of other sequences.
        With checkpoint_every last of all checkpoints (B, S // checkpoint_every, HV, K, V) float32: [b, j] is the state
        behind token (j + 1) * checkpoint_every - 1 of sequence b. With cu_seqlens (S // checkpoint_every, HV, K, V):
        tokens are counted within each sequence, and those of sequence n begin with row cu_seqlens[n] //
        checkpoint_every; rows between them are 0.

    Raises:
        TypeError: q, k or v is no dense tensor of bf16 or fp16; g is no dense tensor of fp32; scale is no number;
            initial_state is no dense tensor of fp32 or bf16; output_final_state or state_v_first is no bool; cu_seqlens
            or state_indices is no dense tensor of int32 or int64; checkpoint_every is no int; dtypes that differ.
        ValueError: checkpoint_every is outside 1 to 2^31 - 1; a number that is not finite in float32; a
            checkpoint_every that is no multiple of 64; shapes that do not go together, devices that differ, strides or
            a base that TMA cannot take; state_indices without initial_state, or with one whose elements share memory.
        NotImplementedError: a K or V that is not supported; more than 65535 sequences (65533 of cu_seqlens) or heads;
            state_indices with a tensor that requires a gradient; what checkpoint_every does not go with.
        RuntimeError: a GPU other than Hopper; state_indices with a pool that was made under torch.inference_mode,
            outside of it.

    Differentiable once, in q, k, v, g and initial_state, through o and the state; gradients are the same, bit for bit,
    in every run. Under torch.autocast q, k and v are cast.

    Source: Katharopoulos et al., 2020; Sun et al., RetNet, 2023, and Yang et al., 2023, for the form in chunks. CPU
    tensors take ``tkq.reference.linear_attention``, by the same rules.

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
    if checkpoint_every is not None:
        scale, output_final_state, state_v_first = options(scale, output_final_state, state_v_first)
        return _checkpoints.call((q, k, v, g, turned(OP, initial_state, state_v_first)), scale, output_final_state,
                                 Where(cu_seqlens, state_indices, state_v_first), checkpoint_every)
    if state_indices is not None:
        scale, output_final_state, state_v_first = options(scale, output_final_state, state_v_first)
        o = _pools.call((q, k, v, g, initial_state), scale, Where(cu_seqlens, state_indices, state_v_first))
        return (o, initial_state) if output_final_state else o
    initial_state = turned(OP, initial_state, state_v_first)
    if not traced:
        found = _call_cache.take(q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first, None)
        if found is not None:
            return results(*found, output_final_state, state_v_first)
    scale, output_final_state, state_v_first = options(scale, output_final_state, state_v_first)
    given = q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first
    mode = ops.route(q, k, v, g, initial_state, cu_seqlens)
    if mode == "direct":
        o, state = (_forward if q.is_cuda else _cpu)(*given)
    elif mode == "record":
        found = _Recorded.apply(*given)
        o, state = found if output_final_state else (found, None)
    else:
        check.refuse_tangent(OP, q=q, k=k, v=v, g=g, initial_state=initial_state)
        # the dispatcher's words name no argument
        check_call(q, k, v, g, initial_state, Where(cu_seqlens, None, state_v_first))
        o, state = _op(*given)
    return results(o, state, output_final_state, state_v_first)


def _scale(scale, q) -> float:
    return q.shape[3]**-0.5 if scale is None else float(scale)


def _forward(q, k, v, g, initial_state, scale, output_final_state, cu_seqlens=None, state_v_first=False,
             state_indices=None):
    """(o, the state or None), of CUDA tensors. States are (.., K, V), whichever of these comes first in memory."""
    check_call(q, k, v, g, initial_state, Where(cu_seqlens, state_indices, state_v_first))
    check_layouts(OP, q, k, v, columns_of(g), names="qkvg")
    final = torch.float32 if output_final_state else None
    if state_indices is not None:
        may_be_written(OP, initial_state)
        final = initial_state.dtype
    if g is not None and g.dim() == 4:
        given = ChannelGiven(q, k, v, g, None, initial_state, final, v_first=state_v_first, cu=cu_seqlens,
                             state_indices=state_indices)
        if q.shape[3] > NARROW:
            return halves.forward(given, _scale(scale, q))
        made, call = channels.start(given, _scale(scale, q))
    else:
        made, call = start(Given(q, k, v, _gates(g), None, initial_state, final, cu=cu_seqlens,
                                 state_indices=state_indices, v_first=state_v_first), _scale(scale, q))
    o, state, *_ = made
    if call is not None:
        _call_cache.add((q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first,
                         state_indices), *call, (o, state))
    return o, state


# The ops return the state always: an empty one where none is asked for.


def _cuda(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], initial_state: Optional[Tensor],
          scale: Optional[float], output_final_state: bool, cu_seqlens: Optional[Tensor],
          state_v_first: bool) -> tuple[Tensor, Tensor]:
    given = q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first
    found = _call_cache.take(*given, None)
    if found is None:
        # of the dispatcher, where no public function has looked at them
        options(scale, output_final_state, state_v_first)
        found = _forward(*given)
    o, state = found
    return o, q.new_empty(0, dtype=torch.float32) if state is None else state


def _gates(g):
    """Of heads: contiguous, as the kernel has them."""
    return g.contiguous() if g is not None and g.dim() == 1 else g


def _cpu(q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first):
    check_call(q, k, v, g, initial_state, Where(cu_seqlens, None, state_v_first))
    check_layouts(OP, q, k, v, columns_of(g), names="qkvg")
    if q.is_meta:  # no lengths to look at
        return _fake(q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first)
    o, state = reference.linear_attn(q, k, v, g, scale, initial_state, cu_seqlens)
    return o.to(q.dtype), laid_out(state, state_v_first) if output_final_state else q.new_empty(0, dtype=torch.float32)


def _fake(q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first):
    check_call(q, k, v, g, initial_state, Where(cu_seqlens, None, state_v_first))
    state = no_states(q, v, cu_seqlens, state_v_first) if output_final_state else q.new_empty(0, dtype=torch.float32)
    return q.new_empty(v.shape), state


def _pool_cuda(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], initial_state: Tensor,
               scale: Optional[float], cu_seqlens: Optional[Tensor], state_indices: Tensor,
               state_v_first: bool) -> Tensor:
    given = q, k, v, g, initial_state, scale, cu_seqlens, state_indices, state_v_first
    o = _pool_replayed(*given)
    if o is None:
        pool = turned(OP, initial_state, state_v_first)
        o, _ = _forward(q, k, v, g, pool, scale, True, cu_seqlens, state_v_first, state_indices)
        written(initial_state)
    return o


def _pool_replayed(q, k, v, g, initial_state, scale, cu_seqlens, state_indices, state_v_first):
    if check.made_in_inference(initial_state):
        return None
    pool = turned(OP, initial_state, state_v_first)
    found = _call_cache.take(q, k, v, g, pool, scale, True, cu_seqlens, state_v_first, state_indices)
    if found is None:
        return None
    written(initial_state)
    return found[0]


def _pool_cpu(q, k, v, g, initial_state, scale, cu_seqlens, state_indices, state_v_first):
    o = _pool_fake(q, k, v, g, initial_state, scale, cu_seqlens, state_indices, state_v_first)
    check_layouts(OP, q, k, v, columns_of(g), names="qkvg")
    may_be_written(OP, initial_state)
    if q.is_meta:
        return o
    pool = turned(OP, initial_state, state_v_first)
    o, states = reference.linear_attn(q, k, v, g, scale, rows_of(pool, state_indices), cu_seqlens)
    put_rows(pool, state_indices, states)
    written(initial_state)
    return o.to(q.dtype)


def _pool_fake(q, k, v, g, initial_state, scale, cu_seqlens, state_indices, state_v_first):
    pool, where = turned(OP, initial_state, state_v_first), Where(cu_seqlens, state_indices, state_v_first)
    check_call(q, k, v, g, pool, where)
    return q.new_empty(v.shape)


def _checkpoints_cuda(q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], initial_state: Optional[Tensor],
                      scale: Optional[float], output_final_state: bool, cu_seqlens: Optional[Tensor],
                      state_v_first: bool, checkpoint_every: int) -> tuple[Tensor, Tensor, Tensor]:
    check_call(q, k, v, g, initial_state, Where(cu_seqlens, None, state_v_first))
    check_layouts(OP, q, k, v)
    made = launch(Given(q, k, v, _gates(g), None, initial_state, torch.float32 if output_final_state else None,
                        cu=cu_seqlens, v_first=state_v_first, checkpoint_every=checkpoint_every), _scale(scale, q))
    state = q.new_empty(0, dtype=torch.float32) if made.state is None else made.state
    return made.o, state, of_packed(made.checkpoints, cu_seqlens)


def _checkpoints_cpu(q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first, every):
    made = _checkpoints_fake(q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first, every)
    check_layouts(OP, q, k, v)
    if q.is_meta:
        return made
    found = on_cpu(lambda q, k, v, g, state: reference.linear_attn(q, k, v, g, scale, state), (q, k, v, g),
                   initial_state, cu_seqlens, every)
    return cpu_results(found, q, output_final_state, state_v_first, cu_seqlens)


def _checkpoints_fake(q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first, every):
    o, state = _fake(q, k, v, g, initial_state, scale, output_final_state, cu_seqlens, state_v_first)
    return o, state, of_packed(no_checkpoints(q, v, every, state_v_first), cu_seqlens)


# ---- gradients ------------------------------------------------------------------------------------------------------


def _backward_cuda(do: Tensor, dstate: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor],
                   initial_state: Optional[Tensor], scale: Optional[float], need_q: bool, need_k: bool, need_v: bool,
                   need_g: bool, need_initial: bool,
                   cu_seqlens: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty ones for what is not wanted."""
    needs = Needs(need_q, need_k, need_v, need_g, need_initial)
    of = backward
    if g is not None and g.dim() == 4:
        of = channels_backward if q.shape[3] <= NARROW else halves.backward
    found = of(Saved(q, k, v, _gates(g), initial_state, cu_seqlens), _scale(scale, q), for_tma(do), dstate, needs)
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _backward_cpu(do, dstate, q, k, v, g, initial_state, scale, *needs):
    *needs, cu_seqlens = needs
    given = q, k, v, g, initial_state
    found = reference.linear_attn_backward(do, dstate, *given, scale, cu_seqlens)
    return tuple(x.to(of.dtype).contiguous() if needed and x is not None else q.new_empty(0)
                 for x, of, needed in zip(found, given, needs))


def _backward_fake(do, dstate, q, k, v, g, initial_state, scale, *needs):
    return tuple(of.new_empty(of.shape) if needed and of is not None else q.new_empty(0)
                 for of, needed in zip((q, k, v, g, initial_state), needs))


_backward_op = ops.torch_op("linear_attn_backward", cuda=_backward_cuda, cpu=_backward_cpu, fake=_backward_fake)
_recorder = Recorder(5, _cuda, _cpu, _backward_cuda, _backward_cpu, _backward_op)
_op = ops.torch_op(OP, cuda=_cuda, cpu=_cpu, fake=_fake, setup=_recorder.setup, backward=_recorder.backward)
_pool_op = ops.torch_op("linear_attn_pool", cuda=_pool_cuda, cpu=_pool_cpu, fake=_pool_fake, of=OP,
                        mutates=("initial_state",))
_checkpoints_op = ops.torch_op("linear_attn_checkpoints", cuda=_checkpoints_cuda, cpu=_checkpoints_cpu,
                               fake=_checkpoints_fake, of=OP)
_checkpoints = Checkpoints(OP, _checkpoints_cuda, _checkpoints_cpu, _checkpoints_op, every_option, check_call)
_pools = Pools(OP, _pool_replayed, _pool_cuda, _pool_cpu, _pool_op, check_call, NAMES[5])
_Recorded = ops.eager_function("LinearAttention", forward=_recorder.record, backward=_recorder.backward, of=OP)
