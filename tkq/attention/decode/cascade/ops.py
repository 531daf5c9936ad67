"""tkq.cascade_attention: what PyTorch sees."""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from tkq.attention.decode import launch, plan_on_cpu
from tkq.attention.decode.cascade.plan_ops import CascadePlan, plan_cascade
from tkq.attention.decode.check import Call, Options, check_layouts, check_out, check_sizes
from tkq.reference import decode as reference
from tkq.runtime import arguments
from tkq.runtime.call import autocast, check, ops

OP = "cascade_attention"
_tensors = arguments.checker(OP, "q", "k_cache", "v_cache", "block_table", "cache_seqlens", "k_descale", "v_descale",
                             "sinks", "cu_seqlens_q", "out")
_lengths = arguments.checker(OP, "prefix_len")
_limits = arguments.checker(OP, "window_size")
_numbers = arguments.checker(OP, "softmax_scale", "softcap")
_flags = arguments.checker(OP, "causal", "batch_invariant", "return_lse", "cascade")


def cascade_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor,
                      cache_seqlens: Optional[Tensor] = None, prefix_len: Optional[int] = None,
                      plan: Optional[CascadePlan] = None, k_descale: Optional[Tensor] = None,
                      v_descale: Optional[Tensor] = None, softmax_scale: Optional[float] = None, causal: bool = True,
                      window_size=(None, None), softcap: float = 0.0, sinks: Optional[Tensor] = None,
                      cu_seqlens_q: Optional[Tensor] = None, batch_invariant: bool = False,
                      cascade: Optional[bool] = None, return_lse: bool = False, out: Optional[Tensor] = None):
    """``flash_attn_with_kvcache`` of sequences that begin with the same keys, which are read once for all of them: the
    queries of the whole batch over the prefix as one sequence, each sequence's over the keys behind it, and
    ``merge_state`` of both. Three launches, or one where reading the prefix once would not pay.

    Args:
        q, k_cache, v_cache, softmax_scale, causal, softcap, sinks, cu_seqlens_q, batch_invariant: as
            ``flash_attn_with_kvcache`` has them. A q (B, Sq, H, D) whose B and Sq are no one dimension in memory is
            copied first.
        block_table: (B, n) int32: the pages of each whole sequence, with the same whole pages of the prefix in all
            rows: where it is read once they are looked up in the first one, for all.
        cache_seqlens: (B,) int32: keys of each sequence, those of the prefix and of its queries among them; 0: there is
            none, and its results mean nothing.
        prefix_len: keys that all sequences begin with. Those of whole pages are read once.
        plan: of ``tkq.plan_cascade`` for such a call, in the place of cache_seqlens and prefix_len: made once a step,
            it serves all layers. None: planned here, by some launches more.
        k_descale, v_descale: of float8 caches, for each head (Hk,) or each slot and head (N, page, Hk).
        window_size: (None, None) or -1: a window over a shared prefix is not supported.
        cascade: True: the prefix is read once; False: by each sequence; None: as ``tkq.plan_cascade`` decides. A plan
            has decided.
        return_lse: also return the log-sum-exp of each row's scaled scores, the sink among them.
        out: where o is written.

    Returns:
        o (B, Sq, H, Dv) or (T, H, Dv), contiguous, of q's dtype, or out; with return_lse the pair (o, lse), lse (B, H,
        Sq) or (H, T) float32, natural logarithm. The same bits in every run. Of ragged queries rows that no sequence
        has are NaN.

    Raises:
        TypeError: q or out is no dense tensor of bf16 or fp16; k_cache or v_cache is no dense tensor of bf16, fp16 or
            e4m3; block_table, cache_seqlens or cu_seqlens_q is no dense tensor of int32; prefix_len is no int;
            k_descale or v_descale is no dense tensor of fp32; softmax_scale or softcap is no number; causal,
            batch_invariant, cascade or return_lse is no bool; window_size is no pair of ints and None; sinks is no
            dense tensor of bf16, fp16 or fp32; plan is no CascadePlan; neither plan nor cache_seqlens
            with prefix_len; dtypes that do not go together.
        ValueError: prefix_len is outside 0 to 2^30 - 1; softmax_scale is not above 0; window_size has a number outside
            -1 to 2^30 - 1; softcap is below 0; a number that is not finite in float32; cache_seqlens, prefix_len or
            cascade with a plan; a plan for another page size or causal; a prefix longer than the table; what
            ``flash_attn_with_kvcache`` has.
        NotImplementedError: a window; scales of sequences; cu_seqlens_q where not causal; a head_dim that is not
            supported; a tensor that requires a gradient, with gradients enabled: there is none.
        RuntimeError: a GPU other than Hopper; an out made under torch.inference_mode that is written to outside.

    Lengths and pages are looked at on the GPU alone, and nothing waits. No key outside of the cache is ever read. A
    sequence whose first query does not see the whole prefix (of fewer keys than prefix_len and, where causal, its
    queries but one, and more than none) is NaN, whichever way the prefix is read; so is one that has a page that is not
    there, and all are where the prefix, read once, has one in the first row. (Where each sequence reads it, pages of
    its own row count.) ``tkq.check_plan`` of the plan's two says which. Results of either part are rounded to q's dtype
    before they are merged, but for those of the prefix that several SMs have found together.

    Source: Ye et al., Cascade Inference (FlashInfer), 2024; Juravsky et al., Hydragen, 2024. CPU tensors take
    ``tkq.reference.decode``, by the same rules.

    Example::

        q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, 64, 16, 2, 128, device="cuda", dtype=torch.bfloat16)  # 64 pages of 16 keys
        table = torch.arange(64, device="cuda", dtype=torch.int32).view(2, 32)
        table[1, :20] = table[0, :20]  # 320 keys that both sequences begin with
        lengths = torch.tensor([500, 330], device="cuda", dtype=torch.int32)
        plan = tkq.plan_cascade(lengths, 8, 2, 128, prefix_len=320, page_size=16)  # once a step, for all layers
        o = tkq.cascade_attention(q, k, v, block_table=table, plan=plan)  # (2, 1, 8, 128) bfloat16
    """
    if ops.traced() or autocast.on():
        q, k_cache, v_cache = autocast.lowered(q, k_cache, v_cache)
    _tensors(q, k_cache, v_cache, block_table, cache_seqlens, k_descale, v_descale, sinks, cu_seqlens_q, out)
    prefix_len, window = _lengths(prefix_len), _limits(window_size)
    softmax_scale, softcap = _numbers(softmax_scale, softcap)
    causal, batch_invariant, return_lse, cascade = _flags(causal, batch_invariant, return_lse, cascade)
    if window != (-1, -1):
        raise NotImplementedError(f"{OP}: window_size is {window_size}; a window over a shared prefix is not supported")
    if cu_seqlens_q is not None and not causal:
        raise NotImplementedError(f"{OP}: cu_seqlens_q is given, causal is False; ragged queries are causal")
    keys = _keys(plan, cache_seqlens, prefix_len, cascade)
    call = Cascade(q, k_cache, v_cache, keys[1], block_table, sinks, keys[2], k_descale, v_descale, cu_seqlens_q,
                   *keys[3:])
    options = Options(causal, softmax_scale, -1, -1, softcap, batch_invariant, return_lse)
    if plan is not None and plan.causal is not causal:
        raise ValueError(f"{OP}: plan is for causal={plan.causal}, causal is {causal}")
    if plan is not None and k_cache.shape[1:2] != (plan.page_size,):
        raise ValueError(f"{OP}: plan is for pages of {plan.page_size}, k_cache is {tuple(k_cache.shape)}")
    if ops.direct(*call, out):
        o, lse = (_run if q.is_cuda else _run_cpu)(call, keys[0], cascade, options, out)
    else:
        check.refuse_gradient(OP, q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, k_descale=k_descale,
                              v_descale=v_descale, out=out)
        _look(call, keys[0], options, out)  # the dispatcher's words name no argument
        check_out(call, out, OP)
        o, lse = _op(*call, keys[0], cascade, causal, softmax_scale, softcap, batch_invariant, return_lse)
        o = o if out is None else out.copy_(o)
    return (o, lse) if return_lse else o


def _keys(plan, seqlens, prefix_len, cascade) -> tuple:
    """(keys of the prefix, lengths, plan, and those of the prefix): what was given in one of two ways."""
    given = {"cache_seqlens": seqlens, "prefix_len": prefix_len}
    if plan is None:
        for (name, x), kind in zip(given.items(), ("a torch.Tensor", "an int")):
            if x is None:
                raise TypeError(f"{OP}: {name}: got NoneType, expected {kind}, or a plan in place of both")
        return prefix_len, seqlens, None, None, None
    if not isinstance(plan, CascadePlan):
        raise TypeError(f"{OP}: plan: got {arguments.came(plan)}, allowed are None and CascadePlans of "
                        "tkq.plan_cascade")
    for name, x in (*given.items(), ("cascade", cascade)):
        if x is not None:
            raise ValueError(f"{OP}: {name} is given, and plan, which was made of it; allowed is one of them")
    for name in ("seqlens", "plan", "prefix_seqlens", "prefix_plan")[:4 if plan.shared else 2]:
        check.dtype(f"{OP}: plan.{name}", getattr(plan, name), ("int32",))
    return plan.shared, plan.seqlens, plan.plan, plan.prefix_seqlens, plan.prefix_plan


class Cascade(NamedTuple):
    """The tensors of a call, in the order of the op's arguments: as `Call`, of whose lengths and plan are those behind
    the prefix; and those of the prefix."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor
    sinks: Optional[Tensor] = None
    plan: Optional[Tensor] = None
    k_descale: Optional[Tensor] = None
    v_descale: Optional[Tensor] = None
    cu_seqlens_q: Optional[Tensor] = None
    prefix_seqlens: Optional[Tensor] = None
    prefix_plan: Optional[Tensor] = None

    def suffix(self, shared) -> Call:
        """Of the keys behind ``shared``, which are whole pages."""
        pages, table = shared // self.k_cache.shape[1], self.block_table
        return Call(*self[:10])._replace(block_table=table[:, pages:] if pages else table)

    def prefix(self, shared) -> Call:
        """Of the shared keys: all queries are of one sequence."""
        q, table = self.q.reshape(1, -1, *self.q.shape[-2:]), self.block_table[:1, :shared // self.k_cache.shape[1]]
        return Call(*self[:10])._replace(q=q, cache_seqlens=self.prefix_seqlens, block_table=table,
                                         sinks=None, plan=self.prefix_plan, cu_seqlens_q=None)


def _look(call, prefix, options, out=None):
    """prefix: keys that the plan shares, or without one those that the sequences begin with."""
    q, k, v, _, table = call[:5]
    for name, x, dims in (("q", q, 4 if call.cu_seqlens_q is None else 3), ("k_cache", k, 4), ("v_cache", v, 4),
                          ("block_table", table, 2)):
        check.rank(f"{OP}: {name}", x, dims)
    for name in ("k_descale", "v_descale"):
        x = getattr(call, name)
        if x is not None and x.dim() == 2:
            raise NotImplementedError(f"{OP}: {name} is {tuple(x.shape)}, of sequences, which have keys in common; "
                                      "supported are scales of heads, and of slots and heads")
    if prefix > k.shape[1] * table.shape[1]:
        raise ValueError(f"{OP}: prefix_len is {prefix}, block_table has room for {k.shape[1] * table.shape[1]} keys")
    planned = call.plan is not None
    check_sizes(call.suffix(prefix if planned else 0), out, OP, options)
    if planned and prefix:
        check_sizes(call.prefix(prefix), op=OP, options=options)


def _planned(call, prefix, cascade, options) -> tuple:
    """(the call with its plans, keys that are read once)."""
    if call.plan is not None:
        return call, prefix
    q, k, v, cu = call.q, call.k_cache, call.v_cache, call.cu_seqlens_q
    sizes = dict(cu_seqlens_q=cu, total_q=q.shape[0]) if cu is not None else dict(max_seqlen_q=max(q.shape[1], 1))
    made = plan_cascade(call.cache_seqlens, q.shape[-2], k.shape[2], q.shape[-1], prefix_len=prefix,
                        page_size=k.shape[1], head_dim_v=v.shape[3], causal=options.causal,
                        batch_invariant=options.batch_invariant, cascade=cascade, **sizes)
    return call._replace(cache_seqlens=made.seqlens, plan=made.plan, prefix_seqlens=made.prefix_seqlens,
                         prefix_plan=made.prefix_plan), made.shared


def _run(call, prefix, cascade, options, out=None):
    """Of CUDA tensors."""
    _look(call, prefix, options, out)
    check_layouts(call.suffix(0), out, OP)
    call, shared = _planned(call, prefix, cascade, options)
    o, lse = _launched(call, shared, options, out)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return o, lse


def _launched(call, shared, options, out):
    if not shared:
        return launch.decode(call.suffix(0), options, out)[:2]
    both = options._replace(return_lse=True)
    *before, parts, _ = launch.decode(call.prefix(shared), both._replace(causal=False, in_parts=True))
    behind = launch.decode(call.suffix(shared), both)[:2]
    return launch.merge(*_as(before, *behind), *behind, out, parts)


def _as(states, o, lse):
    """The prefix's (1, rows, H, Dv) and (1, H, rows) as the sequences' are."""
    if o.dim() == 3:
        return states[0][0], states[1][0]
    B, Sq, H, _ = o.shape
    return states[0].view(o.shape), states[1].view(H, B, Sq).transpose(0, 1)


def _run_cpu(call, prefix, cascade, options, out=None):
    _look(call, prefix, options, out)
    check_layouts(call.suffix(0), out, OP)
    o, lse = _results(call, options)
    o = o if out is None else out
    if not o.is_meta and o.numel():  # which has no numbers to look at
        call, shared = _planned(call, prefix, cascade, options)
        suffix = call.suffix(shared)
        found = reference.flash_attn_with_kvcache(*suffix[:6], *options[:5], *suffix[7:])
        plan_on_cpu.judge(suffix, options, *found)
        if shared:
            prefix = call.prefix(shared)
            before = reference.flash_attn_with_kvcache(*prefix[:6], False, *options[1:5], *prefix[7:])
            plan_on_cpu.judge(prefix, options, *before)
            found = reference.merge_state(*_as(before, *found), *found)
        o.copy_(found[0])
        if options.return_lse:
            lse.copy_(found[1])
    return o, lse


def _results(call, options):
    (*batch, rows, H, _), q = call.q.shape, call.q
    return (q.new_empty(*batch, rows, H, call.v_cache.shape[3]),
            q.new_empty((*batch, H, rows) if options.return_lse else 0, dtype=torch.float32))


def _looked_at(given):
    """(the call, keys of the prefix, cascade, options) of the op's arguments."""
    call, (prefix, cascade, causal, scale, softcap, fixed, return_lse) = Cascade(*given[:12]), given[12:]
    _tensors(*call[:3], call.block_table, call.cache_seqlens, call.k_descale, call.v_descale, call.sinks,
             call.cu_seqlens_q, None)
    _lengths(prefix)
    _flags(causal, fixed, return_lse, cascade)
    _numbers(scale, softcap)
    return call, prefix, cascade, Options(causal, scale, -1, -1, softcap, fixed, return_lse)


def _cuda_op(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor,
             sinks: Optional[Tensor], plan: Optional[Tensor], k_descale: Optional[Tensor], v_descale: Optional[Tensor],
             cu_seqlens_q: Optional[Tensor], prefix_seqlens: Optional[Tensor], prefix_plan: Optional[Tensor],
             prefix_len: int, cascade: Optional[bool], causal: bool, softmax_scale: Optional[float], softcap: float,
             batch_invariant: bool, return_lse: bool) -> tuple[Tensor, Tensor]:
    o, lse = _run(*_looked_at((q, k_cache, v_cache, cache_seqlens, block_table, sinks, plan, k_descale, v_descale,
                               cu_seqlens_q, prefix_seqlens, prefix_plan, prefix_len, cascade, causal, softmax_scale,
                               softcap, batch_invariant, return_lse)))
    return o, lse if return_lse else q.new_empty(0, dtype=torch.float32)


def _fake(*given):
    call, prefix, _, options = _looked_at(given)
    _look(call, prefix, options)
    return _results(call, options)


_op = ops.torch_op(OP, cuda=_cuda_op, cpu=lambda *given: _run_cpu(*_looked_at(given)), fake=_fake)
