"""tkq.flash_attn_fp8: what PyTorch sees."""
from typing import Optional

import torch
from torch import Tensor

from tkq.attention.fp8 import launch
from tkq.attention.fp8.check import (
    OP,
    OPEN,
    Call,
    Options,
    check_call,
    check_layouts,
    check_options,
    flags,
    limits,
    numbers,
    words,
)
from tkq.reference import attention_fp8 as reference
from tkq.runtime.call import check, ops


def flash_attn_fp8(q: Tensor, k: Tensor, v: Tensor, *, q_descale: Optional[Tensor] = None,
                   k_descale: Optional[Tensor] = None, v_descale: Optional[Tensor] = None, causal: bool = False,
                   softmax_scale: Optional[float] = None, window_size=OPEN, accumulate: str = "two_level",
                   out_dtype: torch.dtype = torch.bfloat16, return_lse: bool = False):
    """Attention of float8 tensors on float8 tensor cores: softmax(scale * q @ k.T) @ v, times the descales.

    Probabilities are rounded to e4m3 before they are multiplied by v, in units of 2 ** -8 of the row's largest so far:
    what is below 2 ** -18 of that counts as 0 there.

    Args:
        q: (B, Sq, H, D), float8_e4m3fn, D a multiple of 32 up to 256.
        k, v: (B, Sk, Hk, D), float8_e4m3fn. H is a multiple of Hk: each K/V head serves H / Hk consecutive query heads.
            The last dimension of q and k is contiguous, of v the last or that of the keys; base and other strides are
            multiples of 16 bytes, also 0.
        q_descale, k_descale, v_descale: (B, Hk) float32, above 0, of any strides: what q, k and v are multiplied by.
            Those of q are one for the query heads of a K/V head. None: 1.
        causal: query i sees the keys up to i + Sk - Sq: the last query sees the last key. The same as a right of 0.
        softmax_scale: above 0; 1 / sqrt(D) where not given.
        window_size: (left, right): query i sees the keys from i + Sk - Sq - left to i + Sk - Sq + right, inclusive.
            None or -1: no limit on that side.
        accumulate: how products with v are summed over the keys. "two_level": those of 128 keys or fewer on the tensor
            cores, which keep about 14 bits of a sum and cut off the rest, and these sums in float32. "fast": all keys
            on the tensor cores: over many keys, of values that do not cancel each other out, results come out too near
            to zero.
        out_dtype: bfloat16 or float16.
        return_lse: also return the log-sum-exp of each row's scaled scores. o is then divided by the sum of
            exponentials before they are rounded, and without by the sum of those that were rounded, so that its last
            bits are others; with a window and D above 128, or above 64 and "two_level", by the former always.

    Returns:
        o (B, Sq, H, D), contiguous, of out_dtype; with return_lse the pair (o, lse), lse (B, H, Sq) float32, natural
        logarithm. The same bits in every run. A row that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: q, k or v is no dense tensor of e4m3; q_descale, k_descale or v_descale is no dense tensor of fp32;
            causal or return_lse is no bool; softmax_scale is no number; window_size is no pair of ints and None;
            accumulate is no word; out_dtype is not bf16 or fp16.
        ValueError: softmax_scale is not above 0; window_size has a number outside -1 to 2^30 - 1; accumulate is another
            word; a number that is not finite in float32; shapes that do not go together, devices that differ, strides
            or a base that TMA cannot take.
        NotImplementedError: a head_dim that is not supported; a tensor that requires a gradient, with gradients
            enabled: there is none.
        RuntimeError: a GPU other than Hopper.

    v is transposed first, by a launch of its own, into memory of its size: products of float8 need the keys of each
    column side by side.

    Source: Shah et al., FlashAttention-3, 2024. CPU tensors take ``tkq.reference.attention_fp8.flash_attn_fp8``, by the
    same rules.

    Example::

        x = torch.randn(3, 2, 256, 8, 128, device="cuda")
        scales = x.abs().amax((2, 4)) / 448  # (3, 2, 8) float32
        q, k, v = (x / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
        descales = dict(zip(("q_descale", "k_descale", "v_descale"), scales))
        o = tkq.flash_attn_fp8(q, k, v, causal=True, **descales)  # (2, 256, 8, 128) bfloat16
    """
    traced = ops.traced()  # Dynamo of torch 2.11 knows no `is` between tuples
    left, right = (-1, -1) if not traced and window_size is OPEN else limits[OP](window_size)
    if not traced:
        found = launch.calls.take(q, k, v, q_descale, k_descale, v_descale, causal, softmax_scale, left, right,
                                  accumulate, out_dtype, return_lse)
        if found is not None:
            return found if return_lse else found[0]
    causal, return_lse = flags[OP](causal, return_lse)
    softmax_scale = numbers[OP](softmax_scale)
    accumulate, out_dtype = words[OP](accumulate, out_dtype)
    call = Call(q, k, v, q_descale, k_descale, v_descale)
    options = Options(causal, softmax_scale, left, right, accumulate, out_dtype, return_lse)
    if ops.direct(*call):
        o, lse = (_run if q.is_cuda else _run_cpu)(call, options)
    else:
        check.refuse_gradient(OP, **call._asdict())
        check_call(call)  # the dispatcher's words name no argument
        o, lse = _op(*call, *options)
    return (o, lse) if return_lse else o


def _run(call, options):
    """Of CUDA tensors."""
    check_call(call)
    check_layouts(call)
    return launch.attend(call, options)


def _run_cpu(call, options):
    check_call(call)
    check_layouts(call)  # the GPU's rules, so that what works here works there
    if call.q.is_meta:  # which has no numbers to look at
        return launch.results(call, options)
    o, lse = reference.flash_attn_fp8(*call, *options[:4], options.out_dtype)
    return o, lse if options.return_lse else None


# The op returns two tensors always: an empty lse where none is asked for.


def _of(call, run, options):
    o, lse = run(call, options)
    return o, call.q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _looked_at(given):
    call, options = Call(*given[:6]), Options(*given[6:])
    check_options(options)
    return call, options


def _cuda_op(q: Tensor, k: Tensor, v: Tensor, q_descale: Optional[Tensor], k_descale: Optional[Tensor],
             v_descale: Optional[Tensor], causal: bool, softmax_scale: Optional[float], left: int, right: int,
             accumulate: str, out_dtype: torch.dtype, return_lse: bool) -> tuple[Tensor, Tensor]:
    call, options = _looked_at((q, k, v, q_descale, k_descale, v_descale, causal, softmax_scale, left, right,
                                accumulate, out_dtype, return_lse))
    return _of(call, lambda *asked: launch.calls.take(*call, *options) or _run(*asked), options)


def _cpu_op(*given):
    call, options = _looked_at(given)
    return _of(call, _run_cpu, options)


def _fake(*given):
    call, options = Call(*given[:6]), Options(*given[6:])
    check_call(call)
    return _of(call, launch.results, options)


_op = ops.torch_op(OP, cuda=_cuda_op, cpu=_cpu_op, fake=_fake)
