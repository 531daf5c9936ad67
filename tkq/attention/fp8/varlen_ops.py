"""tkq.flash_attn_fp8_varlen: float8 attention of sequences of any length, one behind the other."""
from typing import Optional

import torch
from torch import Tensor

from tkq.attention.fp8 import varlen_launch as launch
from tkq.attention.fp8.check import (
    OPEN,
    PACKED,
    Call,
    Lengths,
    Options,
    check_first,
    check_layouts,
    check_lines,
    check_options,
    check_packed,
    flags,
    limits,
    longest,
    numbers,
    words,
)
from tkq.reference import attention_fp8 as reference
from tkq.runtime.call import check, ops


def flash_attn_fp8_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Optional[Tensor],
                          max_seqlen_q: int, max_seqlen_k: int, *, q_descale: Optional[Tensor] = None,
                          k_descale: Optional[Tensor] = None, v_descale: Optional[Tensor] = None,
                          causal: bool = False, softmax_scale: Optional[float] = None, window_size=OPEN,
                          accumulate: str = "two_level", out_dtype: torch.dtype = torch.bfloat16,
                          seqused_q: Optional[Tensor] = None, seqused_k: Optional[Tensor] = None,
                          block_table: Optional[Tensor] = None, return_lse: bool = False):
    """``flash_attn_fp8`` of each of B sequences, whose rows lie one behind the other; keys may be in a paged cache.

    Args:
        q: (total_q, H, D), float8_e4m3fn. k, v: (total_k, Hk, D), float8_e4m3fn, or, with a block_table, pages (N,
            page, Hk, D) of any size. The last dimensions are contiguous, base and other strides are multiples of 16
            bytes, also 0.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, rising from 0: sequence s has the rows cu_seqlens_q[s] to
            cu_seqlens_q[s + 1] of q, and so of k and v. Any values: as flash_attn_varlen. They stay on the GPU, and
            under a CUDA graph they may change between replays. With a block_table cu_seqlens_k is None.
        max_seqlen_q, max_seqlen_k: ints, about how long sequences get. Results do not depend on them, and today one
            kernel serves all.
        q_descale, k_descale, v_descale: (B, Hk) float32, above 0, of any strides: what q, k and v of a sequence are
            multiplied by. Those of q are one for the query heads of a K/V head. None: 1.
        causal, softmax_scale, window_size, accumulate, out_dtype: as flash_attn_fp8, for each sequence by itself.
        seqused_q, seqused_k: (B,) int32: how many rows of each sequence, the first ones, are in use. What lies behind
            them in q, k and v is not looked at. Any values: below 0 counts as 0, more than there are as all.
        block_table: (B, n) int32: the pages of each sequence, whose keys are the first seqused_k[s] of them. A row that
            sees a key of a page outside 0 to N - 1 comes out as NaN; keys that a window keeps from all rows may be of
            such pages. K and V are first put together in memory for B * n pages. None: k and v are packed.
        return_lse: also return the log-sum-exp of each row's scaled scores. With and without, o is divided by the sum
            of exponentials before they are rounded.

    Returns:
        o (total_q, H, D), contiguous, of out_dtype; with return_lse the pair (o, lse), lse (H, total_q) float32,
        natural logarithm. The same bits in every run. Rows that belong to no sequence, are not in use or see no key
        have o = 0 and lse = -inf; those before the first sequence, where cu_seqlens_q begins with more than 0, are not
        written.

    Raises:
        TypeError: q, k or v is no dense tensor of e4m3; cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k or block_table
            is no dense tensor of int32; max_seqlen_q or max_seqlen_k is no int; q_descale, k_descale or v_descale is no
            dense tensor of fp32; causal or return_lse is no bool; softmax_scale is no number; window_size is no pair of
            ints and None; accumulate is no word; out_dtype is not bf16 or fp16; cu_seqlens_k is None without a
            block_table.
        ValueError: max_seqlen_q or max_seqlen_k is outside 0 to 2^31 - 1; softmax_scale is not above 0; window_size has
            a number outside -1 to 2^30 - 1; accumulate is another word; a number that is not finite in float32; shapes
            that do not go together, devices that differ, strides or a base that TMA cannot take; on the CPU cu_seqlens
            that do not begin with 0; a block_table beside cu_seqlens_k, or without seqused_k.
        NotImplementedError: a head_dim that is not supported; a tensor that requires a gradient, with gradients
            enabled: there is none.
        RuntimeError: a GPU other than Hopper.

    v is transposed first, by a launch of its own, into memory of its size and 128 keys more for each sequence.

    Source: Shah et al., FlashAttention-3, 2024. CPU tensors take
    ``tkq.reference.attention_fp8.flash_attn_fp8_varlen``, by the same rules.

    Example::

        cu_seqlens = torch.tensor([0, 40, 100, 101], device="cuda", dtype=torch.int32)  # of 40, 60, 1 tokens
        q, k, v = torch.randn(3, 101, 4, 64, device="cuda").to(torch.float8_e4m3fn)
        scale = torch.full((3, 4), 0.5, device="cuda")  # of each sequence and K/V head
        o = tkq.flash_attn_fp8_varlen(q, k, v, cu_seqlens, cu_seqlens, 60, 60, v_descale=scale)  # (101, 4, 64) bfloat16
    """
    traced = ops.traced()  # Dynamo of torch 2.11 knows no `is` between tuples
    left, right = (-1, -1) if not traced and window_size is OPEN else limits[PACKED](window_size)
    if not traced:
        found = launch.calls.take(q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, seqused_q,
                                  seqused_k, block_table, max_seqlen_q, max_seqlen_k, causal, softmax_scale, left,
                                  right, accumulate, out_dtype, return_lse)
        if found is not None:
            return found if return_lse else found[0]
    causal, return_lse = flags[PACKED](causal, return_lse)
    max_seqlen_q, max_seqlen_k = longest(max_seqlen_q, max_seqlen_k)
    softmax_scale = numbers[PACKED](softmax_scale)
    accumulate, out_dtype = words[PACKED](accumulate, out_dtype)
    call = Call(q, k, v, q_descale, k_descale, v_descale)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k)
    options = Options(causal, softmax_scale, left, right, accumulate, out_dtype, return_lse)
    if ops.direct(*call, *lengths[:5]):
        o, lse = (_run if q.is_cuda else _run_cpu)(call, lengths, options)
    else:
        check.refuse_gradient(PACKED, **call._asdict())
        check_packed(call, lengths)  # the dispatcher's words name no argument
        o, lse = _op(*call, *lengths, *options)
    return (o, lse) if return_lse else o


def _run(call, lengths, options):
    """Of CUDA tensors."""
    _look_at(call, lengths)
    return launch.attend(call, lengths, options)


def _look_at(call, lengths):
    check_packed(call, lengths)
    check_layouts(call, PACKED)
    check_lines(lengths)


def _run_cpu(call, lengths, options):
    _look_at(call, lengths)  # the GPU's rules, so that what works here works there
    if call.q.is_meta:  # which has no numbers to look at
        return launch.results(call, options)
    check_first(lengths)
    o, lse = reference.flash_attn_fp8_varlen(*call, *lengths[:5], *options[:4], options.out_dtype)
    return o, lse if options.return_lse else None


# The op returns two tensors always: an empty lse where none is asked for.


def _of(call, found):
    o, lse = found
    return o, call.q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _parts(given):
    return Call(*given[:6]), Lengths(*given[6:13]), Options(*given[13:])


def _looked_at(given):
    call, lengths, options = _parts(given)
    check_options(options, PACKED)
    return call, lengths, options


def _cuda_op(q: Tensor, k: Tensor, v: Tensor, q_descale: Optional[Tensor], k_descale: Optional[Tensor],
             v_descale: Optional[Tensor], cu_seqlens_q: Tensor, cu_seqlens_k: Optional[Tensor],
             seqused_q: Optional[Tensor], seqused_k: Optional[Tensor], block_table: Optional[Tensor],
             max_seqlen_q: int, max_seqlen_k: int, causal: bool, softmax_scale: Optional[float], left: int, right: int,
             accumulate: str, out_dtype: torch.dtype, return_lse: bool) -> tuple[Tensor, Tensor]:
    call, lengths, options = _looked_at((
        q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table,
        max_seqlen_q, max_seqlen_k, causal, softmax_scale, left, right, accumulate, out_dtype, return_lse))
    return _of(call, launch.calls.take(*call, *lengths, *options) or _run(call, lengths, options))


def _cpu_op(*given):
    call, lengths, options = _looked_at(given)
    return _of(call, _run_cpu(call, lengths, options))


def _fake(*given):
    call, lengths, options = _parts(given)
    check_packed(call, lengths)
    return _of(call, launch.results(call, options))


_op = ops.torch_op(PACKED, cuda=_cuda_op, cpu=_cpu_op, fake=_fake)
