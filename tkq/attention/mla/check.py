"""What a caller may pass to mla_decode."""
from typing import NamedTuple, Optional

from torch import Tensor

from tkq.attention.decode.check import FARTHEST, tasks
from tkq.attention.decode.planned import Planned
from tkq.attention.mla.spec import HEAD_DIM, HEAD_DIM_V
from tkq.runtime import arguments
from tkq.runtime.call import check

OP = "mla_decode"
_tensors = arguments.checker(OP, "q", "kv_cache", "block_table", "cache_seqlens", "plan", "out")
flags = arguments.checker(OP, "causal", "batch_invariant", "return_lse")
numbers = arguments.checker(OP, "softmax_scale")


class Call(NamedTuple):
    """The tensors of a call, in the order of the op's arguments."""

    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    cache_seqlens: Tensor
    plan: Optional[Tensor] = None


class Options(NamedTuple):
    softmax_scale: float
    causal: bool = True
    batch_invariant: bool = False
    return_lse: bool = False


def pages(cache: Tensor) -> Tensor:
    """(N, page, 1, 576) of either form of a cache."""
    return cache.unsqueeze(2) if cache.dim() == 3 else cache


def check_call(call: Call, out=None) -> None:
    """Raises what mla_decode promises of its tensors."""
    q, cache, table, seqlens, plan = call
    _tensors(q, cache, table, seqlens, plan, out)
    check.rank(f"{OP}: q", q, 4)
    if cache.dtype != q.dtype:
        raise TypeError(f"{OP}: kv_cache is {cache.dtype}, q is {q.dtype}; both must have one dtype")
    B, Sq, H, D = q.shape
    if D != HEAD_DIM:
        raise NotImplementedError(f"{OP}: q has rows of {D}, supported are {HEAD_DIM}: {HEAD_DIM_V} latent columns, "
                                  f"and {HEAD_DIM - HEAD_DIM_V} that are rotated")
    if not H:
        raise ValueError(f"{OP}: q has 0 heads, allowed is 1 or more")
    _cache(cache)
    check.shape(f"{OP}: block_table", table, (B, None))
    check.shape(f"{OP}: cache_seqlens", seqlens, (B,))
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise ValueError(f"{OP}: block_table has strides {table.stride()}; its last dimension must be contiguous: call "
                         ".contiguous()")
    capacity = cache.shape[1] * table.shape[1]
    if capacity >= FARTHEST:
        raise NotImplementedError(f"{OP}: kv_cache has room for {capacity} keys of a sequence, supported are fewer "
                                  "than 2^30")
    check.same_device(**call._asdict(), out=out)
    of = Planned.made((HEAD_DIM, HEAD_DIM_V), (H, 1), (B, Sq), False)
    tasks(OP, B, of)
    if plan is not None:
        check.shape(f"{OP}: plan", plan, (of.words(B),))
    if out is not None:
        check.shape(f"{OP}: out", out, (B, Sq, H, HEAD_DIM_V))
        if out.dtype != q.dtype:
            raise TypeError(f"{OP}: out is {out.dtype}, results are {q.dtype}")


def _cache(cache):
    if cache.dim() not in (3, 4):
        raise ValueError(f"{OP}: kv_cache is {tuple(cache.shape)}, allowed are (pages, page, {HEAD_DIM}) and (pages, "
                         f"page, 1, {HEAD_DIM})")
    check.shape(f"{OP}: kv_cache", cache, (None, None, *(1,) * (cache.dim() - 3), HEAD_DIM))
    if not cache.shape[1]:
        raise ValueError(f"{OP}: kv_cache is {tuple(cache.shape)}, expected pages of 1 row or more")


def check_layouts(call: Call, out=None) -> None:
    """What copies of 16 bytes cannot take; an out that must not be written to."""
    if out is not None:
        check.refuse_overlap(OP, out=out)
        check.refuse_inference(OP, out=out)
    tensors = dict(q=call.q, kv_cache=call.kv_cache) | ({} if out is None else dict(out=out))
    for name, x in tensors.items():
        if x.stride(-1) != 1 and x.numel():
            raise ValueError(f"{OP}: {name} has strides {x.stride()}; its last dimension must be contiguous: call "
                             ".contiguous()")
        for i in range(x.dim() - 1):
            if x.stride(i) % 8 and x.shape[i] > 1:
                raise ValueError(f"{OP}: {name} has strides {x.stride()}; stride {i} must be a multiple of 8 elements "
                                 "(16 bytes): call .contiguous()")
        if not x.is_meta and x.data_ptr() % 16:
            raise ValueError(f"{OP}: {name} begins at an address that is not a multiple of 16 bytes: call .clone()")
