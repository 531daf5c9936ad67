"""tkq.ssd_step: what PyTorch sees of a step of a state space."""
from typing import Optional

from torch import Tensor

from tkq.linear_attention.step.check import SSD, SsdCall, changed, check_ssd, ssd_options, written
from tkq.linear_attention.step.launch import Given, Options, results, start
from tkq.reference import linear_steps as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_call_cache = CallCache()  # of `_cuda`


def ssd_step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor] = None,
             z: Optional[Tensor] = None, dt_bias: Optional[Tensor] = None, dt_softplus: bool = False,
             state_batch_indices: Optional[Tensor] = None, *, num_accepted_tokens: Optional[Tensor] = None,
             out: Optional[Tensor] = None) -> Tensor:
    """One token, or a few, of a state space (Mamba-2) for each of N sequences: decoding, with the arguments of
    mamba_ssm's selective_state_update in their order. States are in a pool, and are updated in place: with h the state
    of a sequence, P x K for each head, from its first token to its last, dt = dt[t] + dt_bias, or softplus of that,

        h = exp(A dt) h + dt x[t] B[t]',   y[t] = h C[t] + D x[t], times silu(z[t])

    One launch, that reads a state once and writes it once; in float32.

    Args:
        state: the pool, (M, H, P, K), float32 or bfloat16, written to. P and K are multiples of 16 from 32 to 256. Any
            strides that keep its elements apart; fast are those with the matrix of each head contiguous, all of them
            beginning at multiples of 16 bytes.
        x: (N, H, P), or (N, T, H, P) for T tokens, bfloat16 or float16.
        dt: (N, H) or (N, T, H), bfloat16, float16 or float32.
        A: (H,), usually negative.
        B, C: (N, G, K) or (N, T, G, K), as x. H is a multiple of G: H / G neighbouring heads share one group.
        D: (H,), or (H, P).
        z: as x.
        dt_bias: (H,).
            dt, A and dt_bias may also come expanded to a number for each of P, A's also for each of K, with strides of
            0. A, D and dt_bias have any of dt's dtypes; of x, B, C and z the last dimension is contiguous, base and
            other strides are multiples of 16 bytes.
        dt_softplus: dt + dt_bias goes through softplus.
        state_batch_indices: (N,) int32 or int64: the row of the pool that has the state of a sequence. A sequence whose
            row the pool does not have, -1 for example, is skipped: its y is 0, and no state is read or written. No two
            sequences may have one row. None: sequence n has row n.
        num_accepted_tokens: for speculative decoding, (N,) int32 or int64, with state_batch_indices (N, T), as
            ``linear_attn_step`` has it.
        out: where y is written, of x's shape and dtype, laid out as x. It shares no memory with the others.

    Returns:
        y, of x's shape and dtype, contiguous; or out.

    Raises:
        TypeError: state is no dense tensor of fp32 or bf16; x, B, C, z or out is no dense tensor of bf16 or fp16; dt,
            A, D or dt_bias is no dense tensor of bf16, fp16 or fp32; dt_softplus is no bool; state_batch_indices or
            num_accepted_tokens is no dense tensor of int32 or int64; dtypes that differ.
        ValueError: shapes that do not go together, devices that differ, strides or a base that accesses of 16 bytes
            cannot take, a pool or out whose elements share memory, with each other or with another tensor's.
        NotImplementedError: a tensor that requires a gradient, with gradients enabled: there is none; an A, dt or
            dt_bias that differs within a head (Mamba-1); a P or K that is not supported; more than 65535 sequences or
            heads.
        RuntimeError: a GPU other than Hopper; a tensor made under torch.inference_mode that is written to outside.

    Under torch.autocast x, B, C and z are cast.

    Source: Dao and Gu, Transformers are SSMs, 2024. CPU tensors take ``tkq.reference.linear_steps``, by the same rules.

    Example::

        x = torch.randn(4, 16, 64, device="cuda", dtype=torch.bfloat16)
        B, C = torch.randn(2, 4, 1, 128, device="cuda", dtype=torch.bfloat16)
        dt, A = torch.rand(4, 16, device="cuda"), -torch.rand(16, device="cuda")
        pool, rows = torch.zeros(32, 16, 64, 128, device="cuda"), torch.tensor([7, 3, -1, 30], device="cuda")
        y = tkq.ssd_step(pool, x, dt, A, B, C, dt_softplus=True, state_batch_indices=rows)  # (4, 16, 64) bfloat16
    """
    traced = ops.traced()
    if traced or autocast.on():
        x, B, C, z = autocast.lowered(x, B, C, z)
    if not traced and not (check.made_in_inference(state) or check.made_in_inference(out)):
        found = _call_cache.take(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices,
                                 num_accepted_tokens, out)
        if found is not None:
            changed(state, out)
            return found
    dt_softplus = ssd_options(dt_softplus)
    call = SsdCall(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, num_accepted_tokens)
    if ops.direct(x, state, dt, A, B, C, D, z, dt_bias, state_batch_indices, num_accepted_tokens, out):
        return (_cuda if x.is_cuda else _cpu)(call, out)
    check.refuse_gradient(SSD, state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, out=out)
    check_ssd(call, out)  # the dispatcher's words name no argument
    if not traced:  # which has no addresses
        written(SSD, call, out)
    y = _op(*call)
    return y if out is None else out.copy_(y)


def _checked(call, out):
    check_ssd(call, out)
    check.rows_of_16_bytes(SSD, x=call.x, B=call.B, C=call.C, z=call.z)
    written(SSD, call, out)


def _cuda(call, out=None):
    """Of CUDA tensors."""
    _checked(call, out)
    state, x, dt, A, B, C, D, z, dt_bias, softplus, indices, accepted = call
    y = results(x, out, x.dtype)
    given = Given(C, B, x, y, A, dt, state, indices, accepted, D, z, dt_bias)
    launched = start(given, Options(True, False, softplus), 1.0)
    if launched is not None:
        changed(state, out)
        _call_cache.add((*call, out), *launched, y)
    return y


def _cpu(call, out=None):
    _checked(call, out)
    if call.x.is_meta:  # no rows to look at
        return results(call.x, out, call.x.dtype)
    y = reference.ssd_step(*call)
    changed(call.state, None)
    return y.to(call.x.dtype) if out is None else out.copy_(y)


def _cuda_op(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Optional[Tensor],
             z: Optional[Tensor], dt_bias: Optional[Tensor], dt_softplus: bool, state_batch_indices: Optional[Tensor],
             num_accepted_tokens: Optional[Tensor]) -> Tensor:
    call = SsdCall(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, num_accepted_tokens)
    found = None if check.made_in_inference(state) else _call_cache.take(*call, None)
    if found is None:
        ssd_options(dt_softplus)
        return _cuda(call)
    changed(state, None)
    return found


def _fake(*call):
    call = SsdCall(*call)
    check_ssd(call)
    return call.x.new_empty(call.x.shape)


_op = ops.torch_op(SSD, cuda=_cuda_op, cpu=lambda *call: _cpu(SsdCall(*call)), fake=_fake, mutates=("state",))
