"""tkq.plan_decode: what PyTorch sees."""
from typing import Optional

import torch
from torch import Tensor

from tkq.attention.decode import launch
from tkq.attention.decode.check import PLAN, plan_flag, plan_limits, plan_numbers, plan_tensors, tasks
from tkq.attention.decode.planned import Planned
from tkq.reference import decode as reference
from tkq.runtime.call import check, memory, ops


def plan_decode(cache_seqlens: Tensor, num_heads_q: int, num_heads_kv: int, head_dim: int, *,
                head_dim_v: Optional[int] = None, max_seqlen_q: int = 1, window_size=(None, None),
                batch_invariant: bool = False, cu_seqlens_q: Optional[Tensor] = None, total_q: Optional[int] = None,
                out: Optional[Tensor] = None) -> Tensor:
    """How ``flash_attn_with_kvcache`` divides its work among the SMs, from the lengths as they are on the GPU. One
    launch, of ragged queries two; made once a step, it serves all layers.

    Args:
        cache_seqlens: (B,) int32: keys of each sequence.
        num_heads_q, num_heads_kv, head_dim, head_dim_v: of the call; Dv is D where not given.
        max_seqlen_q: the call's Sq.
        window_size, batch_invariant: as in the call; of the window the left side counts.
        cu_seqlens_q, total_q: of a call with ragged queries: where those of each sequence begin, (B + 1,) int32, and
            how many rows q has. max_seqlen_q has no part then.
        out: a plan of the same sizes to be made anew, in a CUDA graph for example.

    Returns:
        An int32 tensor whose size follows from the sizes of the call alone, or out.

    Raises:
        TypeError: cache_seqlens, cu_seqlens_q or out is no dense tensor of int32; num_heads_q, num_heads_kv, head_dim,
            head_dim_v, max_seqlen_q or total_q is no int; window_size is no pair of ints and None; batch_invariant is
            no bool.
        ValueError: num_heads_q, num_heads_kv, head_dim, head_dim_v or max_seqlen_q is outside 1 to 2^31 - 1;
            window_size has a number outside -1 to 2^30 - 1; total_q is outside 0 to 2^31 - 1; num_heads_q is no
            multiple of num_heads_kv; one of cu_seqlens_q and total_q without the other; a tensor of another size or
            device, an out that shares memory with one.
        NotImplementedError: more than 2^24 tasks (sequences, K/V heads and tiles of 64 rows).
        RuntimeError: a GPU other than Hopper; an out made under torch.inference_mode that is written to outside.

    Example::

        lengths = torch.tensor([500, 17], device="cuda", dtype=torch.int32)
        plan = tkq.plan_decode(lengths, 8, 2, 128)  # (2073,) int32
        lengths += 1
        tkq.plan_decode(lengths, 8, 2, 128, out=plan)  # of the next step
    """
    heads_q, heads_kv, head_dim, head_dim_v, queries, total = plan_numbers(
        num_heads_q, num_heads_kv, head_dim, head_dim_v, max_seqlen_q, total_q)
    if (cu_seqlens_q is None) != (total is None):
        raise ValueError(f"{PLAN}: {'total_q' if total is None else 'cu_seqlens_q'} is None; cu_seqlens_q and total_q "
                         "go together")
    if heads_q % heads_kv:
        raise ValueError(f"{PLAN}: num_heads_q is {heads_q}, allowed are multiples of num_heads_kv, {heads_kv}")
    given, ragged = (plan_limits(window_size)[0], plan_flag(batch_invariant)), cu_seqlens_q is not None
    sequences = 1
    if ragged:  # of whose number their tiles depend
        plan_tensors(cache_seqlens, cu_seqlens_q, out)
        check.rank(f"{PLAN}: cache_seqlens", cache_seqlens, 1)
        sequences = cache_seqlens.shape[0]
    of = Planned.made((head_dim, head_dim_v or head_dim), (heads_q, heads_kv), (total,) if ragged else (0, queries),
                      ragged, given, sequences)
    if ops.direct(cache_seqlens, cu_seqlens_q, out):
        return (_run if cache_seqlens.is_cuda else _run_cpu)(cache_seqlens, cu_seqlens_q, of, out)
    _look(cache_seqlens, cu_seqlens_q, of, out)
    if not ops.traced():
        _look_at_out(out, cache_seqlens, cu_seqlens_q)
    found = _op(cache_seqlens, cu_seqlens_q, *of)
    return found if out is None else out.copy_(found)


def _look(seqlens, cu, of, out=None):
    plan_tensors(seqlens, cu, out)
    check.rank(f"{PLAN}: cache_seqlens", seqlens, 1)
    if cu is not None:
        check.shape(f"{PLAN}: cu_seqlens_q", cu, (seqlens.shape[0] + 1,))
        check.same_device(cache_seqlens=seqlens, cu_seqlens_q=cu)
    tasks(PLAN, of.batch(seqlens.shape[0]), of)
    if out is not None:
        check.same_device(cache_seqlens=seqlens, out=out)
        check.shape(f"{PLAN}: out", out, (of.words(seqlens.shape[0]),))
        check.last_dim_contiguous(f"{PLAN}: out", out)


def _look_at_out(out, seqlens, cu):
    """Before anything runs: it may be written to, and lies apart from what is read."""
    if out is not None:
        check.refuse_overlap(PLAN, out=out)
        check.refuse_inference(PLAN, out=out)
        memory.refuse_shared(PLAN, {"out": out}, {"cache_seqlens": seqlens, "cu_seqlens_q": cu})


def _run(seqlens, cu, of, out=None):
    _look(seqlens, cu, of, out)
    _look_at_out(out, seqlens, cu)
    made = launch.make_plan(seqlens, of, out, cu)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return made


def _run_cpu(seqlens, cu, of, out=None):
    _look(seqlens, cu, of, out)
    _look_at_out(out, seqlens, cu)
    made = _fake(seqlens, cu, *of) if out is None else out
    if not made.is_meta:
        made.copy_(reference.plan_decode(seqlens, cu, of, of.parts(132)))
    return made


def _cuda_op(cache_seqlens: Tensor, cu_seqlens_q: Optional[Tensor], heads_q: int, heads_kv: int, keys: int,
             queries: int, left: int, fixed: bool, blocks: int, total: int, together: int,
             latent: bool) -> Tensor:
    return _run(cache_seqlens, cu_seqlens_q,
                Planned(heads_q, heads_kv, keys, queries, left, fixed, blocks, total, together, latent))


def _cpu_op(cache_seqlens, cu_seqlens_q, *of):
    return _run_cpu(cache_seqlens, cu_seqlens_q, Planned(*of))


def _fake(cache_seqlens, cu_seqlens_q, *of):
    of = Planned(*of)
    _look(cache_seqlens, cu_seqlens_q, of)
    return cache_seqlens.new_empty(of.words(cache_seqlens.shape[0]))


_op = ops.torch_op(PLAN, cuda=_cuda_op, cpu=_cpu_op, fake=_fake)
