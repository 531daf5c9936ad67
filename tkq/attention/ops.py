"""tkq.flash_attn: what PyTorch sees of attention."""
import math
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from tkq import reference
from tkq.attention import autograd
from tkq.attention.arguments import (
    OPEN,
    PLAIN,
    Options,
    check_layouts,
    check_operands,
    check_options,
    flags,
    limits,
    lowered,
    numbers,
    refuse_limits,
    refuse_out_of_range,
)
from tkq.attention.common.operands import Operands
from tkq.attention.forward.plan import LONG, SHORT, length_class, pack_of
from tkq.attention.forward.spec import LONG_WINDOW
from tkq.attention.kernels import plan, recipe, spec_of
from tkq.runtime import function
from tkq.runtime.call import alloc, autocast, check, counters, dtypes, ops
from tkq.runtime.call.replay import CallCache
from tkq.runtime.device import arch

# (all that the spec and the plan are made of, device, config) -> (kernel, SMs, scale): as many as kinds of call
_launchers: dict = {}
# What the kernel cannot see, and what is made for it -> (kernel, its numbers, what o and lse are made from)
_launch_cache = ops.LaunchCache()
_call_cache = CallCache(by_stream=True)  # of `forward`


def flash_attn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: Optional[float] = None,
               window_size=OPEN, softcap: float = 0.0, sinks: Optional[Tensor] = None, deterministic: bool = False,
               return_lse: bool = False, score_mod: Optional[Callable] = None, mask_mod: Optional[Callable] = None,
               block_mask=None):
    """Exact attention, softmax(scale * q @ k.T) @ v, without the score matrix in memory.

    Args:
        q: (B, Sq, H, D), bfloat16 or float16, D a multiple of 8 up to 512.
        k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv), as q; Dv need not be D where both are up to 256. H is a multiple of
            Hk: each K/V head serves H / Hk consecutive query heads (GQA, MQA). Sq and Sk may be any length, also 0.
            The last dimension of q, k and v is contiguous; base and other strides are multiples of 16 bytes, also 0:
            slices of a packed qkv tensor and expanded heads go in without a copy.
        causal: query i sees the keys up to i + Sk - Sq: the last query sees the last key. The same as a right of 0.
        softmax_scale: above 0; 1 / sqrt(D) where not given.
        window_size: (left, right): query i sees the keys from i + Sk - Sq - left to i + Sk - Sq + right, inclusive.
            None or -1: no limit on that side.
        softcap: above 0, scores become softcap * tanh(score / softcap), with a tanh good to 2 ** -11.
        sinks: (H,), float32 or q's dtype: for each head the logit of one more key, whose value is 0.
        deterministic: gradients are the same, bit for bit, in every run on one kind of GPU: blocks of keys add to dq in
            a fixed order. With a softcap or a limit on the left, and with shared K/V heads above D 128, dq comes from a
            kernel of its own, which computes the scores again. On an H200, S 1024 to 8192, the backward has 0.93 to
            1.07 of its usual speed at D 64 and 128, shared K/V heads included; at D 256 to S 16384 0.95 to 1.03, and
            0.86 to 0.99 with shared K/V heads. D and Dv up to 64 without shared K/V heads, softcap and limit on
            the left have a fixed order always. o and lse always are the same.
        return_lse: also return the log-sum-exp of each row's scaled scores, the sink among them.
        score_mod, mask_mod, block_mask: functions and block lists of ``tkq.flex_attention``, by whose kernels and rules
            the call is then made, D and Dv up to 256. mask_mod alone skips no blocks; a block_mask has its own. A
            softcap comes before score_mod. causal, window_size, sinks and deterministic are not supported beside them.

    Returns:
        o (B, Sq, H, Dv), contiguous, of q's dtype; with return_lse the pair (o, lse), lse (B, H, Sq) float32, natural
        logarithm. A row that sees no key has o = 0 and lse = -inf, or the sink.

    Raises:
        TypeError: q, k or v is no dense tensor of bf16 or fp16; causal, deterministic or return_lse is no bool;
            softmax_scale or softcap is no number; window_size is no pair of ints and None; sinks is no dense tensor of
            bf16, fp16 or fp32; dtypes that do not go together.
        ValueError: softmax_scale is not above 0; window_size has a number outside -1 to 2^30 - 1; softcap is below 0; a
            number that is not finite in float32; shapes that do not go together, devices that differ, strides or a base
            that TMA cannot take.
        NotImplementedError: a head_dim that is not supported; options that are not supported beside score_mod,
            mask_mod and block_mask, and what ``tkq.flex_attention`` refuses of these.
        RuntimeError: a GPU other than Hopper.

    Differentiable once, in q, k, v and sinks, through o and lse. Under torch.autocast q, k and v are cast, and
    sinks that are not float32.

    Source: Dao et al., FlashAttention, 2022; Shah et al., FlashAttention-3, 2024; FlashAttention-4 for when o is
    corrected. CPU tensors take ``tkq.reference.flash_attn``, by the same rules.

    Example::

        q = torch.randn(2, 128, 8, 64, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, 2, 128, 2, 64, device="cuda", dtype=torch.bfloat16)  # four query heads share one of these
        o = tkq.flash_attn(q, k, v, causal=True)  # (2, 128, 8, 64) bfloat16
        o, lse = tkq.flash_attn(q, k, v, return_lse=True)  # (2, 128, 8, 64) bfloat16; (2, 8, 128) float32
    """
    if not type(causal) is type(deterministic) is type(return_lse) is bool:
        flags["flash_attn"](causal, deterministic, return_lse)
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        tensors = lowered(q, k, v, sinks) if ops.traced() or autocast.on() else (q, k, v, sinks)
        o, lse = _with_functions(tensors, (score_mod, mask_mod, block_mask),
                                 (causal, softmax_scale, window_size, softcap, deterministic))
        return (o, lse) if return_lse else o
    traced = ops.traced()  # Dynamo of torch 2.11 knows no `is` between tuples
    left, right = (-1, -1) if not traced and window_size is OPEN else limits["flash_attn"](window_size)
    if traced or autocast.on():
        q, k, v, sinks = lowered(q, k, v, sinks)
    if not traced:
        found = _call_cache.take(q, k, v, sinks, causal, softmax_scale, left, right, softcap, return_lse)
        if found is not None:
            return found if return_lse else found[0]
    softmax_scale, softcap = numbers["flash_attn"](softmax_scale, softcap)
    options = causal, softmax_scale, left, right, softcap
    mode = ops.route(q, k, v, sinks)
    if mode == "direct":
        o, lse = (forward if q.is_cuda else _cpu)(q, k, v, sinks, options, return_lse)
    elif mode == "record":
        return _Recorded.apply(q, k, v, sinks, (options, deterministic, return_lse))
    else:
        o, lse = _traced(q, k, v, sinks, options, return_lse, deterministic)
    return (o, lse) if return_lse else o


def _with_functions(tensors, functions, options):
    from tkq.attention.flex import flash  # which imports torch's tracers: with the first such call

    return flash.attention(tensors, flash.Functions(*functions), flash.Options(*options))


def _traced(q, k, v, sinks, options, return_lse, deterministic):
    check.refuse_tangent("flash_attn", q=q, k=k, v=v, sinks=sinks)
    _check(q, k, v, sinks, options)  # the dispatcher's words name no argument
    needs = ops.may_record(q, k, v, sinks)
    return _op(q, k, v, sinks, *options, return_lse or needs, deterministic)


def _recorded(ctx, q, k, v, sinks, how):
    """The eager function: forward, with what the gradients need saved. An lse that was not asked for is no result: each
    costs autograd a microsecond."""
    options, deterministic, return_lse = how
    found = _call_cache.take(q, k, v, sinks, *options, True)
    o, lse = found or (forward if q.is_cuda else _cpu)(q, k, v, sinks, options, True)
    autograd.save(ctx, (q, k, v, sinks, o, lse), options, deterministic)
    return autograd.both(ctx, o, lse) if return_lse else o


def _check(q, k, v, sinks, options):
    """Everything that can be wrong with a call; names the argument, what came and what is allowed."""
    check_operands("flash_attn", q, k, v, sinks, 4)
    check_options("flash_attn", Options(*options))


def forward(q, k, v, sinks, options, return_lse):
    """(o, lse or None), of CUDA tensors."""
    try:
        index = q.get_device()
        key = index, q.dtype, q.shape, v.shape, sinks is None or sinks.dtype, options, return_lse
        known = _launch_cache.get(key)
        if known is not None:
            kernel, numbers, of_o, of_lse = known
            o, lse = alloc.empty(index, *of_o), alloc.empty(index, *of_lse) if return_lse else None
            counter = counters.counter(index)
            arguments = (q, k, v, o, lse, sinks), None, counter, numbers
            kernel(*arguments)
            _call_cache.add((q, k, v, sinks, *options, return_lse), kernel, arguments, (o, lse), constants=(counter,))
            return o, lse
        batch, rows, heads, head_dim = q.shape
        _, keys, kv_heads, head_dim_v = v.shape
        if not (batch and rows and heads and keys):
            _check(q, k, v, sinks, options)
            return _empty(q, head_dim_v, sinks, return_lse)
        if heads % kv_heads:
            raise ValueError  # _check has the words
        pitch = heads * head_dim_v
        of_o = (batch, rows, heads, head_dim_v), (rows * pitch, pitch, head_dim_v, 1), q.dtype
        of_lse = (batch, heads, rows), (heads * rows, rows, 1), torch.float32
        o, lse = alloc.empty(index, *of_o), alloc.empty(index, *of_lse) if return_lse else None
        sizes = rows, heads, head_dim, keys, kv_heads, head_dim_v
        kernel, numbers = _launch((q, k, v, o, lse, sinks), sizes, options, index)
        _launch_cache.add(key, (kernel, numbers, of_o, of_lse))
    except Exception:
        # The compiled function checks every dtype, shape, stride and address before it launches; the words for a user
        # are found only when something is wrong.
        _check(q, k, v, sinks, options)
        check_layouts("flash_attn", q=q, k=k, v=v, sinks=sinks)
        raise
    return o, lse


def _empty(q, head_dim_v, sinks, return_lse):
    """No queries, or no keys to see: nothing to launch."""
    batch, rows, heads, _ = q.shape
    lse = nothing_seen((batch, heads, rows), sinks, q.device) if return_lse else None
    return q.new_zeros(batch, rows, heads, head_dim_v), lse


def nothing_seen(shape, sinks, device):
    """lse (.., heads, rows) of rows that see no key."""
    lse = torch.full(shape, -math.inf, dtype=torch.float32, device=device)
    return lse if sinks is None else lse.copy_(sinks.float()[:, None].expand(shape))


def run(operands: Operands, options: Options = PLAIN, config=None):
    """Launch the kernel into operands.o and operands.lse, with no more checks than the compiled function makes.

    config: an AttentionConfig or a WideConfig instead of the plan's: for tests and tuning."""
    _launch(operands, (*operands.q.shape[1:], *operands.v.shape[1:]), options, operands.q.get_device(), config)


def _launch(operands, sizes, options, index, config=None):
    """operands, options: an Operands, an Options, or such tuples. sizes: of q and v, without the batch's. index: of the
    device."""
    q, _, _, _, lse, sinks = operands
    rows, heads, head_dim, keys, kv_heads, head_dim_v = sizes
    causal, softmax_scale, left, right, softcap = options
    if softcap or softmax_scale is not None:
        refuse_out_of_range(softmax_scale, softcap)
    if left != -1 or right != -1:
        refuse_limits(left, right)
    if left >= 0 or right >= 0:
        causal = causal or right == 0
        left, right = -1 if left >= keys - 1 else left, -1 if causal or right >= rows - 1 else right
    pack = 1 if heads == kv_heads else pack_of(rows, heads // kv_heads)
    short, long, long_window = keys < SHORT, keys >= LONG, left >= LONG_WINDOW
    key = (q.dtype, head_dim, head_dim_v, causal, left < 0, right < 0, softcap == 0.0, sinks is None or sinks.dtype,
           pack, lse is None, short, long, long_window, index, config)
    launcher = _launchers.get(key)
    if launcher is None:
        spec = spec_of(
            dtypes.name_of(q.dtype), head_dim, head_dim_v, causal=causal, lse=lse is not None, left=left >= 0,
            right=right >= 0, softcap=softcap > 0, sinks=sinks if sinks is None else dtypes.name_of(sinks.dtype),
            pack=pack, long_window=long_window)
        launcher = _launchers[key] = launcher_of(q.device, spec, length_class(keys), config)
    kernel, num_sms, scale = launcher
    scale = scale if softmax_scale is None else softmax_scale
    numbers = scale, softcap, left, right, num_sms  # a Scalars
    kernel(operands, None, counters.counter(index), numbers)
    return kernel, numbers


def launcher_of(device, spec, length, config=None):
    """(the compiled kernel, how many SMs the device has, the softmax scale where none is given)"""
    arch.require_hopper(device)
    config = config or plan(spec, length)
    return function(recipe(spec, config)), arch.num_sms(device), spec.head_dim**-0.5


def _cpu(q, k, v, sinks, options, return_lse):
    _check(q, k, v, sinks, options)
    if q.numel() and k.numel():  # the GPU's rules, so that what works here works there
        check_layouts("flash_attn", q=q, k=k, v=v, sinks=sinks)
    if q.is_meta:  # which has no numbers to look at
        o, lse = _op_fake(q, k, v, sinks, *options, return_lse, False)
    else:
        o, lse = reference.flash_attn(q, k, v, *options, sinks)
    return o, lse if return_lse else None


# The op returns two tensors always: an empty lse where none is asked for. deterministic is its gradient's.


def _op_cuda(q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], causal: bool, softmax_scale: Optional[float],
             left: int, right: int, softcap: float, return_lse: bool, deterministic: bool) -> tuple[Tensor, Tensor]:
    options = causal, softmax_scale, left, right, softcap
    o, lse = _call_cache.take(q, k, v, sinks, *options, return_lse) or forward(q, k, v, sinks, options, return_lse)
    return o, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _op_cpu(q, k, v, sinks, *flat):
    o, lse = _cpu(q, k, v, sinks, flat[:5], flat[5])
    return o, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _op_fake(q, k, v, sinks, *flat):
    batch, rows, heads, _ = q.shape
    lse = (batch, heads, rows) if flat[5] else (0,)
    return q.new_empty(batch, rows, heads, v.shape[3]), q.new_empty(lse, dtype=torch.float32)


_op = ops.torch_op("flash_attn", cuda=_op_cuda, cpu=_op_cpu, fake=_op_fake, setup=autograd.setup,
                   backward=autograd.backward)
_Recorded = ops.eager_function("FlashAttention", forward=_recorded, backward=autograd.recorded_backward,
                               of="flash_attn")
