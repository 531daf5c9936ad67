"""What a caller may pass to mla_decode."""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from tkq.attention.decode.check import FARTHEST, check_out, tasks
from tkq.attention.decode.planned import Planned
from tkq.attention.mla.spec import HEAD_DIM, HEAD_DIM_V, ROW_BYTES
from tkq.runtime import arguments
from tkq.runtime.call import check

OP = "mla_decode"
_tensors = arguments.checker(OP, "q", "kv_cache", "block_table", "cache_seqlens", "plan", "indices", "topk_length",
                             "out")
flags = arguments.checker(OP, "causal", "batch_invariant", "return_lse")
numbers = arguments.checker(OP, "softmax_scale")


class Call(NamedTuple):
    """The tensors of a call, in the order of the op's arguments. It has a table and lengths, or indices."""

    q: Tensor
    kv_cache: Tensor
    block_table: Optional[Tensor] = None
    cache_seqlens: Optional[Tensor] = None
    plan: Optional[Tensor] = None
    indices: Optional[Tensor] = None
    topk_length: Optional[Tensor] = None

    # methods, not properties: Dynamo of torch 2.9 reads no property of a NamedTuple

    def places(self) -> tuple[int, int]:
        """Sequences of the plan, and the queries of each: with indices each query is one."""
        B, Sq = self.q.shape[:2]
        return (B, Sq) if self.indices is None else (B * Sq, 1)

    def capacity(self) -> int:
        """Keys that a sequence of the plan may have."""
        return self.kv_cache.shape[1] * self.block_table.shape[1] if self.indices is None else self.indices.shape[2]


class Options(NamedTuple):
    softmax_scale: float
    causal: bool = True
    batch_invariant: bool = False
    return_lse: bool = False


def check_call(call: Call, out=None) -> None:
    """Raises what mla_decode promises of its tensors."""
    q, cache, plan = call.q, call.kv_cache, call.plan
    _tensors(*call, out)
    check.rank(f"{OP}: q", q, 4)
    if cache.dtype not in (q.dtype, torch.uint8):
        raise TypeError(f"{OP}: kv_cache is {cache.dtype}, q is {q.dtype}; allowed are q's dtype and "
                        "uint8, of float8 rows of 656 bytes: call .view(torch.uint8)")
    if cache.dtype == torch.uint8 and q.dtype != torch.bfloat16:
        raise NotImplementedError(f"{OP}: q is {q.dtype}, kv_cache is {cache.dtype}; supported with float8 rows is "
                                  "bfloat16")
    B, Sq, H, D = q.shape
    if D != HEAD_DIM:
        raise NotImplementedError(f"{OP}: q has rows of {D}, supported are {HEAD_DIM}: {HEAD_DIM_V} latent columns, "
                                  f"and {HEAD_DIM - HEAD_DIM_V} that are rotated")
    if not H:
        raise ValueError(f"{OP}: q has 0 heads, allowed is 1 or more")
    _cache(cache)
    _keys(call)
    check.same_device(**call._asdict(), out=out)
    of, sequences = Planned.made((HEAD_DIM, HEAD_DIM_V), (H, 1), call.places(), False), call.places()[0]
    tasks(OP, sequences, of)
    if plan is not None:
        check.shape(f"{OP}: plan", plan, (of.words(sequences),))
    if out is not None:
        check.shape(f"{OP}: out", out, (B, Sq, H, HEAD_DIM_V))
        if out.dtype != q.dtype:
            raise TypeError(f"{OP}: out is {out.dtype}, results are {q.dtype}")


def _keys(call):
    """Which keys the queries see: of pages and lengths, or of lists."""
    (B, Sq), indices, lengths = call.q.shape[:2], call.indices, call.topk_length
    pages = {"block_table": call.block_table, "cache_seqlens": call.cache_seqlens}
    for name, x in pages.items():
        if indices is None and x is None:
            raise ValueError(f"{OP}: {name} is None, and so is indices; a call has block_table and cache_seqlens, or "
                             "indices")
        if indices is not None and x is not None:
            raise ValueError(f"{OP}: {name} is given, and indices; indices are rows of the cache, of which each query "
                             "has its own")
    if indices is None:
        if lengths is not None:
            raise ValueError(f"{OP}: topk_length is given, indices is None; it is the length of each list of indices")
        check.shape(f"{OP}: block_table", call.block_table, (B, None))
        check.shape(f"{OP}: cache_seqlens", call.cache_seqlens, (B,))
    else:
        check.shape(f"{OP}: indices", indices, (B, Sq, None))
        if lengths is not None and not (check.fits(lengths, (B,)) or check.fits(lengths, (B, Sq))):
            raise ValueError(f"{OP}: topk_length: shape is {tuple(lengths.shape)}, allowed are ({B},) and ({B}, {Sq}): "
                             "of sequences, of queries")
    name, x = ("block_table", call.block_table) if indices is None else ("indices", indices)
    check.last_dim_contiguous(f"{OP}: {name}", x)
    if call.capacity() >= FARTHEST:
        raise NotImplementedError(f"{OP}: {name} has room for {call.capacity()} keys of a query, supported are fewer "
                                  "than 2^30")


def _cache(cache):
    width = ROW_BYTES if cache.dtype == torch.uint8 else HEAD_DIM
    if cache.dim() not in (3, 4):
        raise ValueError(f"{OP}: kv_cache is {tuple(cache.shape)}, allowed are (pages, page, {width}) and (pages, "
                         f"page, 1, {width})")
    check.shape(f"{OP}: kv_cache", cache, (None, None, *(1,) * (cache.dim() - 3), width))
    if not cache.shape[1]:
        raise ValueError(f"{OP}: kv_cache is {tuple(cache.shape)}, expected pages of 1 row or more")


def check_layouts(call: Call, out=None) -> None:
    """What copies of 16 bytes cannot take; an out that must not be written to."""
    check_out(call, out, OP)
    check.rows_of_16_bytes(OP, empty=True, q=call.q, kv_cache=call.kv_cache)
