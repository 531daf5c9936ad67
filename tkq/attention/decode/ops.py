"""tkq.flash_attn_with_kvcache: what PyTorch sees."""
from typing import Optional

import torch
from torch import Tensor

from tkq.attention.decode import launch, plan_on_cpu
from tkq.attention.decode.check import (
    OP,
    Call,
    Options,
    check_call,
    check_layouts,
    check_out,
    flags,
    limits,
    numbers,
    only_causal,
)
from tkq.reference import decode as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache

_calls = CallCache()  # of calls with a plan


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor,
                            block_table: Optional[Tensor] = None, k_descale: Optional[Tensor] = None,
                            v_descale: Optional[Tensor] = None, softmax_scale: Optional[float] = None,
                            causal: bool = True, window_size=(None, None), softcap: float = 0.0,
                            sinks: Optional[Tensor] = None, plan: Optional[Tensor] = None,
                            cu_seqlens_q: Optional[Tensor] = None, tree_mask: Optional[Tensor] = None,
                            batch_invariant: bool = False, return_lse: bool = False, out: Optional[Tensor] = None):
    """Attention of the last queries of each sequence over a cache of its keys and values: decoding, one launch.

    Args:
        q: (B, Sq, H, D), or with cu_seqlens_q (T, H, D), bfloat16 or float16, D of 64, 96, 128, 192 and 256: the last
            Sq queries of each sequence, Sq from 1 on. As fast as one are those whose Sq * H / Hk is up to 64.
        k_cache, v_cache: pages (N, page, Hk, D) and (N, page, Hk, Dv) of any size from 1 on, which block_table names;
            without one (B, S, Hk, D), a row for each sequence. As q, or float8_e4m3fn; H is a multiple of Hk. The last
            dimension is contiguous; base and other strides are multiples of 16 bytes: caches of heads first, and K and
            V between each other, go in as views.
        cache_seqlens: (B,) int32: keys of each sequence, those of its queries among them; 0: none.
        block_table: (B, n) int32: the pages of each sequence. Keys of a page -1 are skipped.
        k_descale, v_descale: float32, of float8 caches: what their numbers are multiplied by, 0 or more. (Hk,), (B,
            Hk), or of each slot and head (N, page, Hk), without a table (B, S, Hk); of any strides. Both or none.
        softmax_scale: above 0; 1 / sqrt(D) where not given.
        causal: query i of a sequence of L keys sees the keys up to L - Sq + i. The same as a right of 0.
        window_size: (left, right): it sees those from L - Sq + i - left to L - Sq + i + right. None or -1: no limit.
        softcap: above 0, scores become softcap * tanh(score / softcap), with a tanh good to 2 ** -11.
        sinks: (H,), bf16, fp16 or fp32: for each head the logit of one more key, whose value is 0.
        plan: of ``tkq.plan_decode`` for such a call and these lengths; the call uses counters in it, so that calls
            with one plan follow each other on a stream. None: planned here, by a launch more.
        cu_seqlens_q: (B + 1,) int32, rising from 0: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1]
            of q, from none to all of its keys (chunked prefill), causal. Rows that no sequence has are not read, and
            those of the results are NaN with a plan, and not written without.
        tree_mask: (B, Sq) int64, of any strides, Sq up to 64: the last Sq keys of each sequence are drafted tokens,
            those of its queries, and bit j of query i says whether it sees the j-th of them (its own is the i-th). All
            keys before are seen. It takes the place of causal.
        batch_invariant: a sequence's result is the same, bit for bit, whatever else is in the batch: its keys are split
            at multiples of 1024. A plan has to be made likewise.
        return_lse: also return the log-sum-exp of each row's scaled scores, the sink among them.
        out: where o is written.

    Returns:
        o (B, Sq, H, Dv) or (T, H, Dv), contiguous, of q's dtype, or out; with return_lse the pair (o, lse), lse (B, H,
        Sq) or (H, T) float32, natural logarithm. The same bits in every run. A row that sees no key has o = 0 and lse =
        -inf, or the sink.

    Raises:
        TypeError: q or out is no dense tensor of bf16 or fp16; k_cache or v_cache is no dense tensor of bf16, fp16 or
            e4m3; cache_seqlens, block_table, plan or cu_seqlens_q is no dense tensor of int32; k_descale or v_descale
            is no dense tensor of fp32; softmax_scale or softcap is no number; causal, batch_invariant or return_lse is
            no bool; window_size is no pair of ints and None; sinks is no dense tensor of bf16, fp16 or fp32; tree_mask
            is no dense tensor of int64; dtypes that do not go together.
        ValueError: softmax_scale is not above 0; window_size has a number outside -1 to 2^30 - 1; softcap is below 0; a
            number that is not finite in float32; shapes that do not go together, scales without a float8 cache or
            without each other, devices that differ, strides or a base that are no multiple of 16 bytes,
            an out that shares memory with another tensor.
        NotImplementedError: cu_seqlens_q where not causal; tree_mask with cu_seqlens_q, with a window or of more than
            64 queries; a head_dim that is not supported; a tensor that requires a gradient, with gradients enabled:
            there is none.
        RuntimeError: a GPU other than Hopper; an out made under torch.inference_mode that is written to outside.

    Float8 is widened to float16, which has all its numbers, on the way to products with q in float16, whose rows are
    scaled to it by powers of two: nothing else is rounded.

    Lengths and pages are looked at on the GPU alone: nothing waits, and a CUDA graph may be replayed with others, if
    the plan is made anew in it. Under torch.autocast q and the caches are cast: caches of another type at every call.
    No key outside of the cache is ever read: a sequence whose length is negative, beyond its pages or not the planned
    one, or that has a page that is not there (but for -1), has NaN; of ragged queries those do whose tile, of up to 128
    rows, sees such a page. So has all, where the plan is of another call. ``tkq.check_plan`` says which.

    Source: Dao et al., Flash-Decoding, 2023; Sanovar et al., LeanAttention, 2024 (stream-K). CPU tensors take
    ``tkq.reference.decode``, by the same rules.

    Example::

        q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, 64, 16, 2, 128, device="cuda", dtype=torch.bfloat16)  # 64 pages of 16 keys
        table = torch.arange(64, device="cuda", dtype=torch.int32).view(2, 32)
        lengths = torch.tensor([500, 17], device="cuda", dtype=torch.int32)
        plan = tkq.plan_decode(lengths, 8, 2, 128)  # once a step, for all layers
        cache = dict(k_cache=k, v_cache=v, cache_seqlens=lengths, block_table=table)
        o = tkq.flash_attn_with_kvcache(q, **cache, plan=plan)  # (2, 1, 8, 128) bfloat16
    """
    traced = ops.traced()
    if traced or autocast.on():
        q, k_cache, v_cache = autocast.lowered(q, k_cache, v_cache)
    given = (q, k_cache, v_cache, cache_seqlens, block_table, sinks, plan, k_descale, v_descale, cu_seqlens_q,
             tree_mask, causal, softmax_scale, window_size, softcap, batch_invariant, return_lse, out)
    if not traced and plan is not None and not check.made_in_inference(out):
        found = _calls.take(*given)
        if found is not None:
            _changed(out)
            return found[:2] if return_lse else found[0]
    causal, batch_invariant, return_lse = flags(causal, batch_invariant, return_lse)
    left, right = limits(window_size)
    softmax_scale, softcap = numbers(softmax_scale, softcap)
    options = Options(causal, softmax_scale, left, right, softcap, batch_invariant, return_lse)
    call = Call(q, k_cache, v_cache, cache_seqlens, block_table, sinks, plan, k_descale, v_descale, cu_seqlens_q,
                tree_mask)
    only_causal(call, options)
    if ops.direct(*call, out):
        o, lse = _run(call, options, out, given) if q.is_cuda else _run_cpu(call, options, out)
    else:
        check.refuse_gradient(OP, q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, k_descale=k_descale,
                              v_descale=v_descale, out=out)
        check_call(call, out, options)  # the dispatcher's words name no argument
        check_out(call, out)
        o, lse = _op(*call, *options[:-1])  # without in_parts, which no caller asks for
        o = o if out is None else out.copy_(_beside(call, o, out))
    return (o, lse) if return_lse else o


def _beside(call, o, out):
    """The op's result with out's own rows where no sequence has them, which a launch without a plan leaves alone."""
    cu = call.cu_seqlens_q
    if cu is None or call.plan is not None:
        return o
    rows = torch.arange(o.shape[0], device=o.device)
    return torch.where(((rows >= cu[0]) & (rows < cu[-1]))[:, None, None], o, out)


def _changed(out):
    """Its version: the launch is past the dispatcher."""
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _run(call, options, out=None, given=None):
    """Of CUDA tensors. given: what the public function was, to be remembered."""
    check_call(call, out, options)
    check_layouts(call, out)
    o, lse, parts, launched = launch.decode(call, options, out)
    _changed(out)
    if launched is not None and given is not None and call.plan is not None:
        _calls.add(given, *launched, (o, lse, *parts))
    return o, lse


def _run_cpu(call, options, out=None):
    check_call(call, out, options)
    check_layouts(call, out)
    o, lse = _results(call, options)
    o = o if out is None else out
    if not o.is_meta:  # which has no numbers to look at
        found = reference.flash_attn_with_kvcache(*call[:6], *options[:5], *call[7:])
        if call.plan is not None:
            plan_on_cpu.judge(call, options, *found)
        own = slice(None)  # with a plan also rows of no sequence: NaN
        if call.plan is None and call.cu_seqlens_q is not None:
            own = reference.rows_of_sequences(call.cu_seqlens_q, len(o))
        o[own] = found[0][own]
        if options.return_lse:
            lse.mT[own] = found[1].mT[own]
    return o, lse


def _results(call, options):
    (*batch, rows, H, _), q = call.q.shape, call.q
    return (q.new_empty(*batch, rows, H, call.v_cache.shape[3]),
            q.new_empty((*batch, H, rows) if options.return_lse else 0, dtype=torch.float32))


def _looked_at(given):
    options = Options(*given[len(Call._fields):])
    flags(options.causal, options.batch_invariant, options.return_lse)
    limits((options.left, options.right))
    numbers(options.softmax_scale, options.softcap)
    only_causal(Call(*given[:len(Call._fields)]), options)
    return Call(*given[:len(Call._fields)]), options


def _cuda_op(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Optional[Tensor],
             sinks: Optional[Tensor], plan: Optional[Tensor], k_descale: Optional[Tensor], v_descale: Optional[Tensor],
             cu_seqlens_q: Optional[Tensor], tree_mask: Optional[Tensor], causal: bool, softmax_scale: Optional[float],
             left: int, right: int, softcap: float, batch_invariant: bool,
             return_lse: bool) -> tuple[Tensor, Tensor]:
    o, lse = _run(*_looked_at((q, k_cache, v_cache, cache_seqlens, block_table, sinks, plan, k_descale, v_descale,
                               cu_seqlens_q, tree_mask, causal, softmax_scale, left, right, softcap, batch_invariant,
                               return_lse)))
    return o, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake(*given):
    call, options = Call(*given[:len(Call._fields)]), Options(*given[len(Call._fields):])
    check_call(call, options=options)
    return _results(call, options)


_op = ops.torch_op(OP, cuda=_cuda_op, cpu=lambda *given: _run_cpu(*_looked_at(given)), fake=_fake)
