"""What a caller may pass to flex_attention."""
from __future__ import annotations

import math
import weakref
from operator import is_
from typing import Any, NamedTuple

import torch

from tkq.attention.flex.lists import BLOCK as TASK
from tkq.attention.flex.lists import Blocks, widened
from tkq.attention.flex.operands import BlockLists
from tkq.attention.flex.spec import BLOCK, width
from tkq.runtime import arguments
from tkq.runtime.call import check

OP = "flex_attention"
_tensors = arguments.checker(OP, "query", "key", "value")
options = arguments.checker(OP, "scale", "enable_gqa", "return_lse")


def check_operands(q, k, v, gqa: bool) -> None:
    """Types, ranks and shapes."""
    _tensors(q, k, v)
    if not (q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        _refuse_kinds(q, k, v)
    check_columns(q, v)
    (batch, H, _, dim), (batch_k, Hk, Sk, dim_k) = q.shape, k.shape
    if batch_k != batch or dim_k != dim or v.shape[:3] != (batch, Hk, Sk):
        raise ValueError(f"{OP}: key is {tuple(k.shape)}, value is {tuple(v.shape)}, query is {tuple(q.shape)}; "
                         f"allowed are (B, Hk, Sk, D) and (B, Hk, Sk, Dv), with query's B = {batch} and D = {dim}")
    if Hk != H and not gqa:
        raise ValueError(f"{OP}: query has {H} heads, key has {Hk}; without enable_gqa both must have as many")
    if H and (not Hk or H % Hk):
        raise ValueError(f"{OP}: query has {H} heads, key has {Hk}; query's must be a multiple of key's")


def check_columns(q, v, names=("query", "value"), **of) -> None:
    """NotImplementedError, with the arguments' names, where no kernel has as many columns. of: as of ``width``."""
    try:
        width(q.shape[3], v.shape[3], **of)
    except NotImplementedError as problem:
        raise NotImplementedError(f"{problem}: {names[0]} is {tuple(q.shape)}, {names[1]} is "
                                  f"{tuple(v.shape)}") from None


def _refuse_kinds(q, k, v):
    for name, x in (("query", q), ("key", k), ("value", v)):
        check.rank(f"{OP}: {name}", x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"{OP}: {name} is {x.dtype}, query is {q.dtype}; all three must have one dtype")
    check.same_device(query=q, key=k, value=v)


_NAMES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
          "full_q_num_blocks", "full_q_indices")
_known = weakref.WeakKeyDictionary()  # BlockMask -> (what was looked at, its Blocks)


def blocks_of(mask, q, k, op: str = OP):
    """(the mask function or None, its ``Blocks`` or None) of a BlockMask, or of None. A mask that comes again with the
    same tensors is known."""
    if mask is None:
        return None, None
    try:
        looked_at = q.shape, k.shape[2], q.device, mask.BLOCK_SIZE, *[getattr(mask, name) for name in _NAMES]
    except AttributeError:
        return _looked_up(mask, q, k, op)
    seen = _known.get(mask)
    if seen is not None and seen[0][:4] == looked_at[:4] and all(map(is_, seen[0][4:], looked_at[4:])):
        return mask.mask_mod, seen[1]
    found = _looked_up(mask, q, k, op)
    _known[mask] = looked_at, found[1]
    return found


class BlockTensors(NamedTuple):
    """What is to be seen of a block mask, for an op. lists: of ``_NAMES`` those that there are; full: are the full
    blocks' among them? size: of a block, empty where there is no mask."""

    lists: list
    full: bool
    size: list


class Held(NamedTuple):
    """A block mask as ``_looked_up`` takes it."""

    kv_num_blocks: Any
    kv_indices: Any
    full_kv_num_blocks: Any
    full_kv_indices: Any
    q_num_blocks: Any
    q_indices: Any
    full_q_num_blocks: Any
    full_q_indices: Any
    BLOCK_SIZE: tuple
    mask_mod: Any = None


def tensors_of(mask, q, k, op: str = OP) -> BlockTensors:
    """Of a BlockMask or None; what torch.compile can look into."""
    if mask is None:
        return BlockTensors([], False, [])
    _check_mask(mask, q, k, op)
    full = mask.full_kv_num_blocks is not None
    lists = [mask.kv_num_blocks, mask.kv_indices]
    if full:
        lists = [*lists, mask.full_kv_num_blocks, mask.full_kv_indices]
    queries = mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices
    if [x is not None for x in queries] == [True, True, full, full]:
        lists = [*lists, mask.q_num_blocks, mask.q_indices]
        if full:
            lists = [*lists, mask.full_q_num_blocks, mask.full_q_indices]
    return BlockTensors(lists, full, list(mask.BLOCK_SIZE))


def blocks_from(tensors: BlockTensors, q, k):
    """The ``Blocks`` of ``tensors_of``, looked at."""
    if not tensors.size:
        return None
    given = list(tensors.lists)
    for at in () if tensors.full else (2, 6):
        given[at:at] = [None, None] if len(given) >= at else []
    given += [None] * (8 - len(given))
    return _looked_up(Held(*given, tuple(tensors.size)), q, k, OP)[1]


def _check_mask(mask, q, k, op):
    if not all(hasattr(mask, name) for name in ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "mask_mod")):
        raise TypeError(f"{op}: block_mask is {type(mask).__name__}, allowed is None and torch's BlockMask")
    size = mask.BLOCK_SIZE
    if not isinstance(size, (tuple, list)) or len(size) != 2 or not all(type(n) is int or check.is_traced(n)
                                                                       for n in size):
        raise TypeError(f"{op}: block_mask.BLOCK_SIZE is {size!r}, allowed is a pair of ints")
    Sq, Sk = q.shape[2], k.shape[2]
    given = getattr(mask, "seq_lengths", (Sq, Sk))
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"{op}: block_mask.seq_lengths is {given!r}, allowed is a pair of ints")
    if given[0] != Sq or given[1] != Sk:
        raise ValueError(f"{op}: block_mask is of {given[0]} queries and {given[1]} keys; query has {Sq}, key has {Sk}")


def _looked_up(mask, q, k, op):
    _check_mask(mask, q, k, op)
    lists = BlockLists(mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    size, (B, H, Sq, _), Sk = tuple(mask.BLOCK_SIZE), q.shape, k.shape[2]
    if any(s <= 0 or s % BLOCK for s in size):
        raise NotImplementedError(f"{op}: block_mask has blocks of {size[0]} x {size[1]}, supported are multiples of "
                                  f"{BLOCK}")
    # one block of all: not larger than what there is
    size = tuple(min(s, -(-max(n, 1) // TASK) * TASK) if s >= n else s for s, n in zip(size, (Sq, Sk)))
    rows = -(-Sq // size[0])
    for name, x in zip(("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"), lists):
        if x is not None or not name.startswith("full"):
            _check_list(f"{op}: block_mask.{name}", x, (B, H, rows), 3 + name.endswith("indices"), q)
    if (lists.full_num is None) != (lists.full_indices is None):
        raise ValueError(f"{op}: block_mask: full_kv_num_blocks and full_kv_indices go together")
    queries = _queries_of(mask, (B, H, -(-Sk // size[1])), q, op)
    return mask.mask_mod, widened(Blocks(lists, size, queries), q)


def _queries_of(mask, shape, q, op):
    """The lists the other way round, where the mask has them all."""
    names = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    found = BlockLists(*(getattr(mask, name, None) for name in names))
    full = mask.full_kv_num_blocks is not None
    if [x is not None for x in found] != [True, True, full, full]:
        return None
    for name, x in zip(names, found):
        if x is not None:
            _check_list(f"{op}: block_mask.{name}", x, shape, 3 + name.endswith("indices"), q)
    return found


def _check_list(name, x, shape, rank, q):
    check.settled(name, x)
    check.rank(name, x, rank)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} is {x.dtype}, allowed is torch.int32")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}, query on {q.device}")
    if any(n not in (1, wanted) for n, wanted in zip(x.shape[:2], shape[:2])) or x.shape[2] != shape[2]:
        columns = ", columns" * (rank == 4)
        B, H = (f"{n} 1" if size == 1 else f"{n} 1 or {size}" for n, size in zip("BH", shape))
        raise ValueError(f"{name} is {tuple(x.shape)}, allowed is (B, H, {shape[2]}{columns}) with {B}, {H}")
    if rank == 4 and not x.shape[3]:
        raise ValueError(f"{name} has no columns, allowed are 1 and more")


def settled(name, traced, q, op: str = OP):
    """The same, whose captured tensors' numbers lie in memory, where the query does."""
    for x in () if traced is None else traced.tensors:
        if x.device != q.device:
            raise ValueError(f"{op}: {name}: a captured tensor {tuple(x.shape)} is on {x.device}, expected {q.device}")
        if x.is_neg() or x.is_conj() or x._is_zerotensor():
            return traced._replace(tensors=tuple([in_memory(y) for y in traced.tensors]))
    return traced


def in_memory(x):
    """A tensor whose numbers lie in memory: a copy of a view with a pending negation or conjugation, and of zeros that
    have none."""
    if x is None or not (x.is_neg() or x.is_conj() or x._is_zerotensor()):
        return x
    return x.resolve_conj().resolve_neg().clone()


def scale_of(scale, head_dim: int) -> float:
    return 1 / math.sqrt(head_dim) if scale is None else scale
