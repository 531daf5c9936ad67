"""tkq.plan_cascade: how attention over a shared prefix is divided, once a step."""
from typing import NamedTuple, Optional

from torch import Tensor

from tkq.attention.decode.cascade import sharing
from tkq.attention.decode.plan_ops import plan_decode
from tkq.runtime import arguments
from tkq.runtime.call import check

OP = "plan_cascade"
MOST = (1 << 31) - 1  # an int32
_tensors = arguments.checker(OP, "cache_seqlens", "cu_seqlens_q")
_numbers = arguments.checker(OP, "num_heads_q", "num_heads_kv", "head_dim", "prefix_len", "page_size", "head_dim_v",
                             "max_seqlen_q", "total_q")
_flags = arguments.checker(OP, "causal", "batch_invariant", "cascade")


class CascadePlan(NamedTuple):
    """Of ``plan_cascade``. shared: keys that are read once for all sequences, 0: each reads its own. page_size: of the
    cache. causal: of the call. seqlens (B,): keys of each sequence behind the shared ones, -1 where it has too few.
    plan: of ``plan_decode`` for them. prefix_seqlens (1,), prefix_plan: of the shared keys, None where there are none.
    """

    shared: int
    page_size: int
    causal: bool
    seqlens: Tensor
    plan: Tensor
    prefix_seqlens: Optional[Tensor] = None
    prefix_plan: Optional[Tensor] = None


def plan_cascade(cache_seqlens: Tensor, num_heads_q: int, num_heads_kv: int, head_dim: int, *, prefix_len: int,
                 page_size: int, head_dim_v: Optional[int] = None, max_seqlen_q: int = 1, causal: bool = True,
                 batch_invariant: bool = False, cu_seqlens_q: Optional[Tensor] = None, total_q: Optional[int] = None,
                 cascade: Optional[bool] = None) -> CascadePlan:
    """Whether ``cascade_attention`` reads a shared prefix once for the whole batch, and the plans for it: made once a
    step, for all layers. Nothing waits for the GPU; inside a CUDA graph each replay makes it of the lengths then.

    Args:
        cache_seqlens: (B,) int32: keys of each sequence, those of the prefix and of its queries among them.
        num_heads_q, num_heads_kv, head_dim, head_dim_v: of the call; Dv is D where not given.
        prefix_len: keys that all sequences begin with. Those of whole pages are read once, the others by each sequence.
        page_size: rows of a page of the cache.
        max_seqlen_q: the call's Sq.
        causal, batch_invariant: as in the call.
        cu_seqlens_q, total_q: of a call with ragged queries, as ``plan_decode`` has them. max_seqlen_q has no part
            then.
        cascade: True: keys of whole pages are read once; False: by each sequence. None: once where that saves more
            reading than the second launch and merging cost, by the sizes above; not with batch_invariant, whose results
            must not depend on how many sequences there are.

    Returns:
        a CascadePlan, whose ``plan`` and ``prefix_plan`` (None where nothing is read once) ``tkq.check_plan`` takes.

    Raises:
        TypeError: cache_seqlens or cu_seqlens_q is no dense tensor of int32; num_heads_q, num_heads_kv, head_dim,
            prefix_len, page_size, head_dim_v, max_seqlen_q or total_q is no int; causal, batch_invariant or cascade
            is no bool.
        ValueError: num_heads_q, num_heads_kv, head_dim, page_size, head_dim_v or max_seqlen_q is outside 1 to 2^31 - 1;
            prefix_len is outside 0 to 2^30 - 1; total_q is outside 0 to 2^31 - 1; num_heads_q is no multiple of
            num_heads_kv; one of cu_seqlens_q and total_q without the other; a tensor of another size or device.
        NotImplementedError: cu_seqlens_q where not causal; more than 2^24 tasks (sequences, K/V heads and tiles of 64
            rows).
        RuntimeError: a GPU other than Hopper.

    Example::

        lengths = torch.tensor([5000, 4117], device="cuda", dtype=torch.int32)
        plan = tkq.plan_cascade(lengths, 8, 2, 128, prefix_len=4096, page_size=16, cascade=True)
        behind = tkq.plan_cascade(lengths, 8, 2, 128, prefix_len=4096, page_size=16, cascade=True).seqlens  # (2,) int32
        plan.shared, behind.tolist()  # 4096, [904, 21]
    """
    _tensors(cache_seqlens, cu_seqlens_q)
    heads_q, heads_kv, head_dim, prefix_len, page_size, head_dim_v, queries, total = _numbers(
        num_heads_q, num_heads_kv, head_dim, prefix_len, page_size, head_dim_v, max_seqlen_q, total_q)
    causal, batch_invariant, cascade = _flags(causal, batch_invariant, cascade)
    check.rank(f"{OP}: cache_seqlens", cache_seqlens, 1)
    if (cu_seqlens_q is None) != (total is None):
        raise ValueError(f"{OP}: {'total_q' if total is None else 'cu_seqlens_q'} is None; cu_seqlens_q and total_q "
                         "go together")
    if heads_q % heads_kv:
        raise ValueError(f"{OP}: num_heads_q is {heads_q}, allowed are multiples of num_heads_kv, {heads_kv}")
    batch, ragged = check.plain_size(cache_seqlens.shape[0]), cu_seqlens_q is not None
    if ragged:
        check.shape(f"{OP}: cu_seqlens_q", cu_seqlens_q, (batch + 1,))
        check.same_device(cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q)
        if not causal:
            raise NotImplementedError(f"{OP}: cu_seqlens_q is given, causal is False; ragged queries are causal")
    rows, shared = total if ragged else batch * queries, sharing.whole_pages(prefix_len, page_size)
    if cascade is None:
        heads, dims = (heads_q, heads_kv), (head_dim, head_dim_v or head_dim)
        cascade = not batch_invariant and sharing.pays(shared, batch, total if ragged else queries, heads, dims, ragged)
    if not cascade or batch == 0 or rows == 0:
        shared = 0
    sizes, given = (heads_q, heads_kv, head_dim), dict(head_dim_v=head_dim_v, batch_invariant=batch_invariant)
    # those by which a sequence's first query sees the whole prefix, so that reading it once changes nothing
    least = cu_seqlens_q.diff() + (prefix_len - 1) if ragged else min(prefix_len + (queries - 1) * causal, MOST)
    seqlens = _behind(cache_seqlens, least if prefix_len else 0, shared)
    own = dict(cu_seqlens_q=cu_seqlens_q, total_q=total) if ragged else dict(max_seqlen_q=queries)
    made = CascadePlan(shared, page_size, causal, seqlens, plan_decode(seqlens, *sizes, **given, **own))
    if not shared:
        return made
    prefix = cache_seqlens.new_full((1,), shared)
    return made._replace(prefix_seqlens=prefix, prefix_plan=plan_decode(prefix, *sizes, **given, max_seqlen_q=rows))


def _behind(seqlens, least, shared):
    """Keys behind the shared ones: -1 for a sequence of fewer than ``least``, 0 for one of no key."""
    # in place, of numbers that the launches bring: torch.where would copy them from the host, which no graph records
    return (seqlens - shared).masked_fill_(seqlens < least, -1).masked_fill_(seqlens == 0, 0)
