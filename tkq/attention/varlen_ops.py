"""tkq.flash_attn_varlen: attention of sequences of any length, one behind the other."""
from typing import Optional

import torch
from torch import Tensor

from tkq import reference
from tkq.attention import autograd
from tkq.attention.arguments import (
    OPEN,
    PLAIN,
    Lengths,
    Options,
    check_first,
    check_layouts,
    check_operands,
    check_options,
    check_sequences,
    flags,
    limits,
    longest,
    lowered,
    numbers,
    refuse_limits,
    refuse_out_of_range,
)
from tkq.attention.common.operands import Operands
from tkq.attention.forward.plan import LONG, SHORT, length_class, pack_of
from tkq.attention.forward.spec import LONG_WINDOW
from tkq.attention.kernels import spec_of
from tkq.attention.ops import launcher_of, nothing_seen
from tkq.runtime.call import alloc, autocast, check, counters, dtypes, ops
from tkq.runtime.call.replay import CallCache

_launchers: dict = {}  # as ops._launchers
_launch_cache = ops.LaunchCache()  # as ops._known, where all rows are in use
_call_cache = CallCache(by_stream=True)  # of `forward`, likewise


def flash_attn_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
                      max_seqlen_k: int, *, causal: bool = False, softmax_scale: Optional[float] = None,
                      window_size=OPEN, softcap: float = 0.0, sinks: Optional[Tensor] = None,
                      seqused_q: Optional[Tensor] = None, seqused_k: Optional[Tensor] = None,
                      return_lse: bool = False, deterministic: bool = False):
    """``flash_attn`` of each of B sequences, whose rows lie one behind the other.

    Args:
        q: (total_q, H, D), bfloat16 or float16. k, v: (total_k, Hk, D) and (total_k, Hk, Dv). Strides: see flash_attn.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, rising from 0: sequence s has the rows cu_seqlens_q[s] to
            cu_seqlens_q[s + 1] of q, and so of k and v. A sequence may have no queries, or no keys. They stay on the
            GPU: nothing waits for their values, and under a CUDA graph they may change between replays. Any values:
            a number below 0 counts as 0, one beyond the rows as their number, and one below a number before it as that
            one, so its sequence is empty. Nothing outside the tensors is read or written. The first is to be 0: where
            it is more, o, lse and the gradients of the rows before it are not written. On the CPU another first number
            than 0 is a ValueError; all else is as on the GPU.
        max_seqlen_q, max_seqlen_k: ints, about how long sequences get: what kernel is chosen. Results do not depend on
            them: they may be too small, or too large.
        seqused_q, seqused_k: (B,) int32: how many rows of each sequence, the first ones, are in use. What lies behind
            them in q, k and v is not looked at. Any values: below 0 counts as 0, more than there are as all.
        causal, softmax_scale, window_size, softcap, sinks, deterministic: as flash_attn, for each sequence by itself;
            dq is added up in a fixed order only where deterministic asks for it, at D 64 too.
        return_lse: also return the log-sum-exp.

    Returns:
        o (total_q, H, Dv), contiguous; with return_lse the pair (o, lse), lse (H, total_q) float32. Rows that belong to
        no sequence or are not in use are rows that see no key: o = 0, lse = -inf, or the sink. They have no part in any
        gradient, that of the sinks through their lse neither; a row that is in use and sees no key does.

    Raises:
        TypeError: q, k or v is no dense tensor of bf16 or fp16; cu_seqlens_q, cu_seqlens_k, seqused_q or seqused_k is
            no dense tensor of int32; max_seqlen_q or max_seqlen_k is no int; causal, return_lse or deterministic is no
            bool; softmax_scale or softcap is no number; window_size is no pair of ints and None; sinks is no dense
            tensor of bf16, fp16 or fp32; dtypes that do not go together.
        ValueError: max_seqlen_q or max_seqlen_k is outside 0 to 2^31 - 1; softmax_scale is not above 0; window_size has
            a number outside -1 to 2^30 - 1; softcap is below 0; a number that is not finite in float32; shapes that do
            not go together, devices that differ, strides or a base that TMA cannot take.
        NotImplementedError, RuntimeError: as flash_attn.

    Differentiable once, in q, k, v and sinks, through o and lse.

    CPU tensors take ``tkq.reference.flash_attn_varlen``.

    Example::

        cu_seqlens = torch.tensor([0, 40, 100, 101], device="cuda", dtype=torch.int32)  # of 40, 60, 1 tokens
        q, k, v = torch.randn(3, 101, 4, 64, device="cuda", dtype=torch.bfloat16)
        o = tkq.flash_attn_varlen(q, k, v, cu_seqlens, cu_seqlens, 60, 60, causal=True)  # (101, 4, 64) bfloat16
    """
    if not (type(causal) is type(deterministic) is type(return_lse) is bool
            and type(max_seqlen_q) is type(max_seqlen_k) is int):
        flags["flash_attn_varlen"](causal, deterministic, return_lse)
        max_seqlen_q, max_seqlen_k = longest(max_seqlen_q, max_seqlen_k)
    traced = ops.traced()  # Dynamo of torch 2.11 knows no `is` between tuples
    left, right = (-1, -1) if not traced and window_size is OPEN else limits["flash_attn_varlen"](window_size)
    if traced or autocast.on():
        q, k, v, sinks = lowered(q, k, v, sinks)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    if not traced:
        found = _call_cache.take(q, k, v, sinks, *lengths, causal, softmax_scale, left, right, softcap, return_lse)
        if found is not None:
            return found if return_lse else found[0]
    longest(max_seqlen_q, max_seqlen_k)
    softmax_scale, softcap = numbers["flash_attn_varlen"](softmax_scale, softcap)
    options = causal, softmax_scale, left, right, softcap
    mode = ops.route(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, seqused_q, seqused_k)
    if mode == "direct":
        o, lse = (forward if q.is_cuda else _cpu)(q, k, v, sinks, lengths, options, return_lse)
    elif mode == "record":
        return _Recorded.apply(q, k, v, sinks, (lengths, options, deterministic, return_lse))
    else:
        o, lse = _traced(q, k, v, sinks, lengths, options, return_lse, deterministic)
    return (o, lse) if return_lse else o


def _traced(q, k, v, sinks, lengths, options, return_lse, deterministic):
    check.refuse_tangent("flash_attn_varlen", q=q, k=k, v=v, sinks=sinks)
    _check(q, k, v, sinks, lengths, options)  # the dispatcher's words name no argument
    needs = ops.may_record(q, k, v, sinks)
    return _op(q, k, v, sinks, *lengths, *options, return_lse or needs, deterministic)


def _recorded(ctx, q, k, v, sinks, how):
    """The eager function: forward, with what the gradients need saved."""
    lengths, options, deterministic, return_lse = how
    found = _call_cache.take(q, k, v, sinks, *lengths, *options, True)
    o, lse = found or (forward if q.is_cuda else _cpu)(q, k, v, sinks, lengths, options, True)
    autograd.save(ctx, (q, k, v, sinks, o, lse), options, deterministic, lengths)
    return autograd.both(ctx, o, lse) if return_lse else o


def _check(q, k, v, sinks, lengths, options):
    """Everything that can be wrong with a call, but for the values of cu_seqlens and seqused."""
    check_operands("flash_attn_varlen", q, k, v, sinks, 3)
    check_sequences("flash_attn_varlen", q, Lengths(*lengths))
    check_options("flash_attn_varlen", Options(*options))


def _check_layouts(q, k, v, sinks, lengths):
    check_layouts("flash_attn_varlen", q=q, k=k, v=v, sinks=sinks, **Lengths(*lengths)._asdict())


def forward(q, k, v, sinks, lengths, options, return_lse):
    """(o, lse or None), of CUDA tensors."""
    try:
        index = q.get_device()
        cu_q, cu_k, seqused_q, seqused_k, max_q, max_k = lengths
        key = (index, q.dtype, q.shape, v.shape, cu_q.shape, seqused_k is None or seqused_k.shape, max_q, max_k,
               sinks is None or sinks.dtype, options, return_lse)
        known = _launch_cache.get(key) if seqused_q is None else None
        if known is not None:
            kernel, numbers, of_o, of_lse = known
            o, lse = alloc.empty(index, *of_o), alloc.empty(index, *of_lse) if return_lse else None
            counter = counters.counter(index)
            arguments = (q, k, v, o, lse, sinks), (cu_q, cu_k, None, seqused_k), counter, numbers
            kernel(*arguments)
            _call_cache.add((q, k, v, sinks, *lengths, *options, return_lse), kernel, arguments, (o, lse),
                            constants=(counter,))
            return o, lse
        total, heads, head_dim = q.shape
        keys, kv_heads, head_dim_v = v.shape
        number = cu_q.shape[0] - 1
        if not (total and heads and keys) or number <= 0:
            _check(q, k, v, sinks, lengths, options)
            lse = nothing_seen((heads, total), sinks, q.device) if return_lse else None
            return q.new_zeros(total, heads, head_dim_v), lse
        if (heads % kv_heads or max_q < 0 or max_k < 0 or (seqused_q is not None and seqused_q.shape[0] != number)
                or (seqused_k is not None and seqused_k.shape[0] != number)):
            raise ValueError  # _check has the words
        of_o = (total, heads, head_dim_v), (heads * head_dim_v, head_dim_v, 1), q.dtype
        of_lse = (heads, total), (total, 1), torch.float32
        if seqused_q is None:
            o, lse = alloc.empty(index, *of_o), alloc.empty(index, *of_lse) if return_lse else None
        else:  # rows that are not in use belong to no task
            _check(q, k, v, sinks, lengths, options)
            _check_layouts(q, k, v, sinks, lengths)
            o = q.new_zeros(total, heads, head_dim_v)
            lse = nothing_seen((heads, total), sinks, q.device) if return_lse else None
        sizes = heads, head_dim, kv_heads, head_dim_v
        kernel, numbers = _launch((q, k, v, o, lse, sinks), sizes, lengths, options, index)
        if seqused_q is None:
            _launch_cache.add(key, (kernel, numbers, of_o, of_lse))
    except Exception:  # the words for a user are found only when something is wrong
        _check(q, k, v, sinks, lengths, options)
        _check_layouts(q, k, v, sinks, lengths)
        raise
    return o, lse


def run(operands: Operands, lengths: Lengths, options: Options = PLAIN, config=None):
    """Launch the kernel into operands.o (total_q, H, Dv) and operands.lse (H, total_q), with no more checks than the
    compiled function makes.

    config: an AttentionConfig or a WideConfig instead of the plan's: for tests and tuning."""
    sizes = (*operands.q.shape[1:], *operands.v.shape[1:])
    _launch(operands, sizes, lengths, options, operands.q.get_device(), config)


def _launch(operands, sizes, lengths, options, index, config=None):
    """operands, lengths, options: an Operands, a Lengths, an Options, or such tuples. sizes: of q and v, without the
    tokens. index: of the device."""
    q, _, _, _, lse, sinks = operands
    heads, head_dim, kv_heads, head_dim_v = sizes
    causal, softmax_scale, left, right, softcap = options
    if softcap or softmax_scale is not None:
        refuse_out_of_range(softmax_scale, softcap)
    if left != -1 or right != -1:
        refuse_limits(left, right)
    cu_q, cu_k, seqused_q, seqused_k, max_q, max_k = lengths
    causal = causal or right == 0
    right = -1 if causal else right
    pack = 1 if heads == kv_heads else pack_of(max_q, heads // kv_heads)
    short, long = max_k < SHORT, max_k >= LONG
    key = (q.dtype, head_dim, head_dim_v, causal, left < 0, right <= 0, softcap == 0.0, sinks is None or sinks.dtype,
           seqused_q is None, seqused_k is None, pack, lse is None, short, long, left >= LONG_WINDOW, index, config)
    launcher = _launchers.get(key)
    if launcher is None:
        spec = spec_of(
            dtypes.name_of(q.dtype), head_dim, head_dim_v, causal=causal, lse=lse is not None, left=left >= 0,
            right=right > 0, softcap=softcap > 0, sinks=sinks if sinks is None else dtypes.name_of(sinks.dtype),
            varlen=True, seqused_q=seqused_q is not None, seqused_k=seqused_k is not None, pack=pack,
            long_window=left >= LONG_WINDOW)
        launcher = _launchers[key] = launcher_of(q.device, spec, length_class(max_k), config)
    kernel, num_sms, scale = launcher
    scale = scale if softmax_scale is None else softmax_scale
    numbers = scale, softcap, left, right, num_sms  # a Scalars
    kernel(operands, (cu_q, cu_k, seqused_q, seqused_k), counters.counter(index), numbers)
    return kernel, numbers


def _cpu(q, k, v, sinks, lengths, options, return_lse):
    _check(q, k, v, sinks, lengths, options)
    if q.is_meta:  # no lengths to look at
        o, lse = _op_fake(q, k, v, sinks, *lengths, *options, return_lse, False)
        return o, lse if return_lse else None
    check_first("flash_attn_varlen", lengths)
    if q.numel() and k.numel():  # the GPU's rules, so that what works here works there
        _check_layouts(q, k, v, sinks, lengths)
    o, lse = reference.flash_attn_varlen(q, k, v, *lengths[:4], *options, sinks)
    return o, lse if return_lse else None


# The op returns two tensors always: an empty lse where none is asked for. deterministic is its gradient's.


def _op_cuda(q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
             seqused_q: Optional[Tensor], seqused_k: Optional[Tensor], max_seqlen_q: int, max_seqlen_k: int,
             causal: bool, softmax_scale: Optional[float], left: int, right: int, softcap: float,
             return_lse: bool, deterministic: bool) -> tuple[Tensor, Tensor]:
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    options = causal, softmax_scale, left, right, softcap
    o, lse = (_call_cache.take(q, k, v, sinks, *lengths, *options, return_lse)
              or forward(q, k, v, sinks, lengths, options, return_lse))
    return o, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _op_cpu(q, k, v, sinks, *flat):
    o, lse = _cpu(q, k, v, sinks, flat[:6], flat[6:11], flat[11])
    return o, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _op_fake(q, k, v, sinks, *flat):
    total, heads, _ = q.shape
    lse = (heads, total) if flat[11] else (0,)
    return q.new_empty(total, heads, v.shape[2]), q.new_empty(lse, dtype=torch.float32)


_op = ops.torch_op("flash_attn_varlen", cuda=_op_cuda, cpu=_op_cpu, fake=_op_fake, setup=autograd.setup_varlen,
                   backward=autograd.backward_varlen)
_Recorded = ops.eager_function("FlashAttentionVarlen", forward=_recorded, backward=autograd.recorded_backward,
                               of="flash_attn_varlen")
