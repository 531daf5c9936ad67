"""tkq.plan_decode: what PyTorch sees."""
from typing import Optional

import torch
from torch import Tensor

from tkq.attention.decode import launch, words
from tkq.attention.decode.check import PLAN, plan_flag, plan_limits, plan_numbers, plan_tensors, tasks
from tkq.attention.decode.launch import Planned
from tkq.attention.decode.plan import blocks_of_sm, key_block, tiles_together
from tkq.reference import decode as reference
from tkq.runtime.call import check, ops


def plan_decode(cache_seqlens: Tensor, num_heads_q: int, num_heads_kv: int, head_dim: int, *,
                head_dim_v: Optional[int] = None, max_seqlen_q: int = 1, window_size=(None, None),
                batch_invariant: bool = False, out: Optional[Tensor] = None) -> Tensor:
    """How ``flash_attn_with_kvcache`` divides its work among the SMs, from the lengths as they are on the GPU. One
    launch; made once a step, it serves all layers.

    Args:
        cache_seqlens: (B,) int32: keys of each sequence.
        num_heads_q, num_heads_kv, head_dim, head_dim_v: of the call; Dv is D where not given.
        max_seqlen_q: the call's Sq.
        window_size, batch_invariant: as in the call; of the window the left side counts.
        out: a plan of the same sizes to be made anew, in a CUDA graph for example.

    Returns:
        An int32 tensor whose size follows from the sizes of the call alone, or out.

    Raises:
        TypeError: cache_seqlens or out is no dense tensor of int32; num_heads_q, num_heads_kv, head_dim, head_dim_v or
            max_seqlen_q is no int; window_size is no pair of ints and None; batch_invariant is no bool.
        ValueError: num_heads_q, num_heads_kv, head_dim, head_dim_v or max_seqlen_q is outside 1 to 2^31 - 1;
            window_size has a number outside -1 to 2^30 - 1; num_heads_q is no multiple of num_heads_kv; an out of
            another size or device.
        NotImplementedError: more than 2^24 tasks (sequences, K/V heads and tiles of 64 rows).
        RuntimeError: a GPU other than Hopper; an out made under torch.inference_mode that is written to outside.

    Example::

        lengths = torch.tensor([500, 17], device="cuda", dtype=torch.int32)
        plan = tkq.plan_decode(lengths, 8, 2, 128)  # (2073,) int32
        lengths += 1
        tkq.plan_decode(lengths, 8, 2, 128, out=plan)  # of the next step
    """
    heads_q, heads_kv, head_dim, head_dim_v, queries = plan_numbers(num_heads_q, num_heads_kv, head_dim, head_dim_v,
                                                                    max_seqlen_q)
    left, _ = plan_limits(window_size)
    of = Planned(heads_q, heads_kv, key_block(head_dim, head_dim_v or head_dim), queries, left,
                 plan_flag(batch_invariant), blocks_of_sm(head_dim, head_dim_v or head_dim),
                 tiles_together(head_dim, queries, heads_q // heads_kv))
    if ops.direct(cache_seqlens, out):
        return (_run if cache_seqlens.is_cuda else _run_cpu)(cache_seqlens, of, out)
    _look(cache_seqlens, of, out)
    found = _op(cache_seqlens, *of)
    return found if out is None else out.copy_(found)


def _look(seqlens, of, out=None):
    plan_tensors(seqlens, out)
    check.rank(f"{PLAN}: cache_seqlens", seqlens, 1)
    if of.heads_q % of.heads_kv:
        raise ValueError(f"{PLAN}: num_heads_q is {of.heads_q}, allowed are multiples of num_heads_kv, {of.heads_kv}")
    tasks(PLAN, seqlens.shape[0], of.heads_kv, of.queries, of.group)
    if out is not None:
        check.same_device(cache_seqlens=seqlens, out=out)
        check.shape(f"{PLAN}: out", out, (words.size(seqlens.shape[0], of.heads_kv, of.tiles),))
        check.last_dim_contiguous(f"{PLAN}: out", out)


def _run(seqlens, of, out=None):
    _look(seqlens, of, out)
    if out is not None:
        check.refuse_inference(PLAN, out=out)
    made = launch.make_plan(seqlens, of, out)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return made


def _run_cpu(seqlens, of, out=None):
    _look(seqlens, of, out)
    made = _fake(seqlens, *of) if out is None else out
    if not made.is_meta:
        made.copy_(reference.plan_decode(seqlens, of.sizes(seqlens.shape[0], of.parts(132))))
    return made


def _cuda_op(cache_seqlens: Tensor, heads_q: int, heads_kv: int, keys: int, queries: int, left: int,
             fixed: bool, blocks: int, together: int) -> Tensor:
    return _run(cache_seqlens, Planned(heads_q, heads_kv, keys, queries, left, fixed, blocks,
                                        together))


def _cpu_op(cache_seqlens, *of):
    return _run_cpu(cache_seqlens, Planned(*of))


def _fake(cache_seqlens, *of):
    of = Planned(*of)
    _look(cache_seqlens, of)
    return cache_seqlens.new_empty(words.size(cache_seqlens.shape[0], of.heads_kv, of.tiles))


_op = ops.torch_op(PLAN, cuda=_cuda_op, cpu=_cpu_op, fake=_fake)
