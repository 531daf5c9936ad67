"""tkq.mla_decode: what PyTorch sees."""
import math
from typing import Optional

import torch
from torch import Tensor

from tkq.attention.decode import plan_on_cpu
from tkq.attention.decode.check import check_out
from tkq.attention.mla import launch
from tkq.attention.mla.check import OP, Call, Options, check_call, check_layouts, flags, numbers
from tkq.attention.mla.spec import HEAD_DIM_V
from tkq.reference import mla as reference
from tkq.runtime.call import autocast, check, ops
from tkq.runtime.call.replay import CallCache, View

_calls = CallCache()  # of calls with a plan
_TENSORS = len(Call._fields)


def mla_decode(q: Tensor, kv_cache: Tensor, block_table: Optional[Tensor] = None,
               cache_seqlens: Optional[Tensor] = None, *, softmax_scale: float, causal: bool = True,
               plan: Optional[Tensor] = None, indices: Optional[Tensor] = None, topk_length: Optional[Tensor] = None,
               batch_invariant: bool = False, return_lse: bool = False, out: Optional[Tensor] = None):
    """Multi-head latent attention (MLA), absorbed, of the last queries of each sequence over a paged cache: decoding,
    dense, or sparse over the rows of the cache that are listed for each query.

    The cache has one row a token, of 512 latent columns and 64 rotated ones: all 576 are the key of every head, the
    first 512 its value. Queries come multiplied with the key's up-projection; results go to the value's.

    Args:
        q: (B, Sq, H, 576), bfloat16 or float16: the last Sq queries of each sequence, any H. As fast as one row are
            those whose Sq * H is up to 64.
        kv_cache: pages (N, page, 576) or (N, page, 1, 576) of any size from 1 on; as q. Or float8 rows, for q in
            bfloat16: (N, page, 656) or (N, page, 1, 656) uint8, of which 512 are columns of e4m3, 16 four float32
            scales, of 128 columns each, and 128 the 64 rotated columns in bfloat16. The last dimension is contiguous;
            base and other strides are multiples of 16 bytes.
        block_table: (B, n) int32: the pages of each sequence. Keys of a page -1 are skipped. None with indices.
        cache_seqlens: (B,) int32: keys of each sequence, those of its queries among them; 0: none. None with indices.
        softmax_scale: above 0. Of the heads before absorption, (d_nope + d_rope) ** -0.5 and what YaRN adds to it: of
            DeepSeek-V3 192 ** -0.5 times a factor, not 576 ** -0.5.
        causal: query i of a sequence of L keys sees the keys up to L - Sq + i. With indices a query sees the rows of
            its list, whatever causal is.
        plan: of ``tkq.plan_decode`` with num_heads_kv of 1, head_dim of 576 and head_dim_v of 512, for these lengths;
            with indices for B * Sq sequences of one query, whose lengths are those of the lists. None: planned here, by
            a launch or two more.
        indices: (B, Sq, topk) int32: the keys of each query, as rows of the cache: page * rows of a page + row of the
            page, in any order; a row that is listed twice counts twice. -1 is skipped. The last dimension is
            contiguous.
        topk_length: (B,) or (B, Sq) int32: how many indices of each list count, from the first on. None: all.
        batch_invariant: a sequence's result is the same, bit for bit, whatever else is in the batch: its keys are split
            at multiples of 1024. A plan has to be made likewise.
        return_lse: also return the log-sum-exp of each row's scaled scores.
        out: where o is written.

    Returns:
        o (B, Sq, H, 512), contiguous, of q's dtype, or out; with return_lse the pair (o, lse), lse (B, H, Sq) float32,
        natural logarithm. The same bits in every run. A row that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: q or out is no dense tensor of bf16 or fp16; kv_cache is no dense tensor of bf16, fp16 or uint8;
            block_table, cache_seqlens, plan, indices or topk_length is no dense tensor of int32; softmax_scale is no
            number; causal, batch_invariant or return_lse is no bool; dtypes that do not go together.
        ValueError: softmax_scale is not above 0; a number that is not finite in float32; neither block_table and
            cache_seqlens nor indices, or both; topk_length without indices; shapes that do not go together, devices
            that differ, strides or a base that are no multiple of 16 bytes, an out that shares memory with another
            tensor.
        NotImplementedError: rows of q other than 576; float8 rows for q in fp16; room for 2^30 keys or more of a
            sequence or list; more tasks than the kernel counts; a tensor that requires a gradient, with gradients
            enabled: there is none.
        RuntimeError: a GPU other than Hopper; an out made under torch.inference_mode that is written to outside.

    Lengths, pages and indices are looked at on the GPU alone, as ``tkq.flash_attn_with_kvcache`` does: what is not in
    the cache is never read, gives NaN, of a query's list to this query alone, and ``tkq.check_plan`` names it.

    Source: DeepSeek-AI, DeepSeek-V2, 2024 (MLA); DeepSeek-V3.2-Exp, 2025 (keys chosen for each query); Li and Liu,
    FlashMLA, 2025 (two halves of O in two warpgroups). CPU tensors take ``tkq.reference.mla``, by the same rules.

    Example::

        q = torch.randn(2, 1, 16, 576, device="cuda", dtype=torch.bfloat16)
        cache = torch.randn(16, 64, 576, device="cuda", dtype=torch.bfloat16)  # 16 pages of 64 tokens
        table = torch.arange(16, device="cuda", dtype=torch.int32).view(2, 8)
        lengths = torch.tensor([500, 17], device="cuda", dtype=torch.int32)
        plan = tkq.plan_decode(lengths, 16, 1, 576, head_dim_v=512)  # once a step, for all layers
        o = tkq.mla_decode(q, cache, table, lengths, softmax_scale=192 ** -0.5, plan=plan)  # (2, 1, 16, 512) bfloat16

        rows = torch.randint(0, 16 * 64, (2, 1, 256), device="cuda", dtype=torch.int32)  # 256 of the 1024, or fewer
        plan = tkq.plan_decode(torch.tensor([256, 17], device="cuda", dtype=torch.int32), 16, 1, 576, head_dim_v=512)
        o = tkq.mla_decode(q, cache, softmax_scale=192 ** -0.5, plan=plan, indices=rows,
                           topk_length=torch.tensor([256, 17], device="cuda", dtype=torch.int32))
    """
    traced = ops.traced()
    if traced or autocast.on():
        q, kv_cache = autocast.lowered(q, kv_cache)
    given = (q, kv_cache, block_table, cache_seqlens, plan, indices, topk_length, softmax_scale, causal,
             batch_invariant, return_lse, out)
    if not traced and plan is not None and not check.made_in_inference(out):
        found = _calls.take(*given)
        if found is not None:
            _changed(out)
            return found[:2] if return_lse else found[0]
    causal, batch_invariant, return_lse = flags(causal, batch_invariant, return_lse)
    softmax_scale = numbers(softmax_scale)
    options = Options(softmax_scale, causal, batch_invariant, return_lse)
    call = Call(q, kv_cache, block_table, cache_seqlens, plan, indices, topk_length)
    if ops.direct(*call, out):
        o, lse = _run(call, options, out, given) if q.is_cuda else _run_cpu(call, options, out)
    else:
        check.refuse_gradient(OP, q=q, kv_cache=kv_cache, out=out)
        check_call(call, out)  # the dispatcher's words name no argument
        check_out(call, out, OP)
        o, lse = _op(*call, *options)
        o = o if out is None else out.copy_(o)
    return (o, lse) if return_lse else o


def _changed(out):
    """Its version: the launch is past the dispatcher."""
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _run(call, options, out=None, given=None):
    """Of CUDA tensors. given: what the public function was, to be remembered."""
    check_call(call, out)
    check_layouts(call, out)
    o, lse, parts, launched = launch.decode(call, options, out)
    _changed(out)
    if launched is not None and given is not None and call.plan is not None:
        run, (q, (cache, *others), scalars) = launched
        cache = cache if cache is call.kv_cache else View(call.kv_cache, cache)
        _calls.add(given, run, (q, (cache, *others), scalars), (o, lse, *parts))
    return o, lse


def _run_cpu(call, options, out=None):
    check_call(call, out)
    check_layouts(call, out)
    o, lse = _results(call, options)
    o = o if out is None else out
    if not o.is_meta:  # which has no numbers to look at
        found = reference.mla_decode(*call[:4], options.softmax_scale, options.causal, call.indices, call.topk_length)
        if call.plan is not None:
            _judge(call, options, *found)
        o.copy_(found[0])
        if options.return_lse:
            lse.copy_(found[1])
    return o, lse


def _judge(call, options, o, lse):
    """NaN in results where the plan does not fit, as `plan_on_cpu.judge`."""
    (B, Sq), lengths, cache = call.q.shape[:2], launch.lengths_of(call), call.kv_cache
    if call.indices is None:
        lies = plan_on_cpu.bad_pages(call.block_table, lengths, cache.shape[1], cache.shape[0])
    else:  # keys are rows, each a page of its own
        lies = plan_on_cpu.bad_pages(call.indices.flatten(0, 1), lengths, 1, cache.shape[0] * cache.shape[1])
    fine = plan_on_cpu.noted(call.plan, launch.planned(call, options), lengths, call.capacity(), lies)
    fine = fine[:, None].expand(B, Sq) if call.indices is None else fine.view(B, Sq)
    o[~fine] = math.nan
    lse.mT[~fine] = math.nan


def _results(call, options):
    (B, Sq, H, _), q = call.q.shape, call.q
    return (q.new_empty(B, Sq, H, HEAD_DIM_V),
            q.new_empty((B, H, Sq) if options.return_lse else 0, dtype=torch.float32))


def _looked_at(given):
    options = Options(*given[_TENSORS:])
    flags(options.causal, options.batch_invariant, options.return_lse)
    numbers(options.softmax_scale)
    return Call(*given[:_TENSORS]), options


def _cuda_op(q: Tensor, kv_cache: Tensor, block_table: Optional[Tensor], cache_seqlens: Optional[Tensor],
             plan: Optional[Tensor], indices: Optional[Tensor], topk_length: Optional[Tensor], softmax_scale: float,
             causal: bool, batch_invariant: bool, return_lse: bool) -> tuple[Tensor, Tensor]:
    o, lse = _run(*_looked_at((q, kv_cache, block_table, cache_seqlens, plan, indices, topk_length, softmax_scale,
                               causal, batch_invariant, return_lse)))
    return o, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake(*given):
    call, options = Call(*given[:_TENSORS]), Options(*given[_TENSORS:])
    check_call(call)
    return _results(call, options)


_op = ops.torch_op(OP, cuda=_cuda_op, cpu=lambda *given: _run_cpu(*_looked_at(given)), fake=_fake)
