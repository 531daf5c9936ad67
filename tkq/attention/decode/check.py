"""What a caller may pass to flash_attn_with_kvcache and plan_decode."""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from tkq.attention.decode.planned import Planned
from tkq.attention.decode.spec import DecodeSpec
from tkq.runtime import arguments
from tkq.runtime.call import check, dtypes, memory

OP, PLAN = "flash_attn_with_kvcache", "plan_decode"
MOST_TASKS, MOST_DRAFTS = 1 << 24, 64  # of a plan; of a tree mask, whose rows are 64 bits
FARTHEST = 1 << 30
_tensors = arguments.checker(OP, "q", "k_cache", "v_cache", "cache_seqlens", "block_table", "sinks", "plan",
                             "k_descale", "v_descale", "cu_seqlens_q", "tree_mask", "out")
flags = arguments.checker(OP, "causal", "batch_invariant", "return_lse")
limits = arguments.checker(OP, "window_size")
numbers = arguments.checker(OP, "softmax_scale", "softcap")
plan_tensors = arguments.checker(PLAN, "cache_seqlens", "cu_seqlens_q", "out")
plan_numbers = arguments.checker(PLAN, "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v", "max_seqlen_q",
                                 "total_q")
plan_limits = arguments.checker(PLAN, "window_size")
plan_flag = arguments.checker(PLAN, "batch_invariant")


class Call(NamedTuple):
    """The tensors of a call, in the order of the op's arguments."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Optional[Tensor] = None
    sinks: Optional[Tensor] = None
    plan: Optional[Tensor] = None
    k_descale: Optional[Tensor] = None
    v_descale: Optional[Tensor] = None
    cu_seqlens_q: Optional[Tensor] = None
    tree_mask: Optional[Tensor] = None


class Options(NamedTuple):
    """left, right: -1 without a limit; causal: right is 0. in_parts: of the decode kernel's spec."""

    causal: bool = True
    softmax_scale: Optional[float] = None
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    batch_invariant: bool = False
    return_lse: bool = False
    in_parts: bool = False


def check_call(call: Call, out=None, options=None) -> None:
    """Raises what flash_attn_with_kvcache promises of its tensors. options: on which the size of its plan depends."""
    _tensors(*call, out)
    check_sizes(call, out, options=options)


def check_sizes(call: Call, out=None, op: str = OP, options=None) -> None:
    """Of tensors of the types that they may have. op: whose call it is. options: as `check_call` has them."""
    q, k, v, seqlens, table, sinks = call[:6]
    cu = call.cu_seqlens_q
    for name, x in (("k_cache", k), ("v_cache", v)):
        check.rank(f"{op}: {name}", x, 4)
    check.rank(f"{op}: q", q, 4 if cu is None else 3)
    float8 = k.dtype == torch.float8_e4m3fn
    if not float8 and k.dtype != q.dtype:
        raise TypeError(f"{op}: k_cache is {k.dtype}, q is {q.dtype}; allowed are q's dtype and float8_e4m3fn")
    if v.dtype != k.dtype:
        raise TypeError(f"{op}: v_cache is {v.dtype}, k_cache is {k.dtype}; both must have one dtype")
    (*places, H, D), (pages, page, Hk, Dk) = q.shape, k.shape
    check.rank(f"{op}: cache_seqlens", seqlens, 1)
    B = seqlens.shape[0] if cu is not None else places[0]
    if cu is not None:
        check.shape(f"{op}: cu_seqlens_q", cu, (B + 1,))
    check.shape(f"{op}: v_cache", v, (pages, page, Hk, None))
    if Dk != D:
        raise ValueError(f"{op}: k_cache has rows of {Dk}, q of {D}; they must be as long")
    if not Hk or not H or H % Hk:
        raise ValueError(f"{op}: q has {H} heads, k_cache has {Hk}; q's must be a multiple of the cache's, and 1 or "
                         "more")
    _supported(op, q, v)
    check.shape(f"{op}: cache_seqlens", seqlens, (B,))
    _room(op, k, table, B)
    _scales(op, call, float8)
    _tree(op, call, B)
    if sinks is not None:
        check.shape(f"{op}: sinks", sinks, (H,))
    check.same_device(**call._asdict(), out=out)
    _planned(op, call, options, B)
    if out is not None:
        _written(op, out, (*places, H, v.shape[3]), q.dtype)


def _planned(op, call, options, batch):
    """Of ragged queries it depends on an order between their number and the sequences', which kernel takes them: that
    is asked for a plan alone, and where some kernel would make too many tasks of them."""
    q, ragged = call.q, call.cu_seqlens_q is not None
    if ragged and call.plan is None and 2 * q.shape[-2] * (q.shape[0] + batch) <= MOST_TASKS:
        return
    of = Planned.of(call, options)
    tasks(op, of.batch(batch), of)
    if call.plan is not None:
        check.shape(f"{op}: plan", call.plan, (of.words(batch),))


def _scales(op, call, float8):
    """Scales of a head, of a sequence and a head, or of a slot of the cache and a head."""
    given = {"k_descale": call.k_descale, "v_descale": call.v_descale}
    if all(x is None for x in given.values()):
        return
    if not float8:
        raise ValueError(f"{op}: {next(n for n, x in given.items() if x is not None)} is given, k_cache is "
                         f"{call.k_cache.dtype}; scales are of float8 caches")
    heads, slots = call.k_cache.shape[2], tuple(call.k_cache.shape[:3])
    allowed = (heads,), (call.cache_seqlens.shape[0], heads), slots
    for name, x in given.items():
        if x is None:
            raise ValueError(f"{op}: {name} is None; k_descale and v_descale go together")
        if not any(check.fits(x, shape) for shape in allowed):
            raise ValueError(f"{op}: {name}: shape is {tuple(x.shape)}, allowed are {', '.join(map(str, allowed))}: of "
                             "heads, of sequences and heads, of the cache's slots and heads")
    if call.k_descale.dim() != call.v_descale.dim():
        raise ValueError(f"{op}: k_descale has {call.k_descale.dim()} dimensions, v_descale {call.v_descale.dim()}; "
                         "both must have as many")


def _tree(op, call, batch):
    """A mask of as many bits as there are drafts."""
    if call.tree_mask is None:
        return
    if call.cu_seqlens_q is not None:
        raise NotImplementedError(f"{op}: tree_mask is given, and cu_seqlens_q; supported are tree masks of sequences "
                                  "with as many queries")
    queries = call.q.shape[1]
    check.shape(f"{op}: tree_mask", call.tree_mask, (batch, queries))
    if queries > MOST_DRAFTS:
        raise NotImplementedError(f"{op}: tree_mask is {tuple(call.tree_mask.shape)}, supported are up to "
                                  f"{MOST_DRAFTS} queries, one for each bit")


def _room(op, k, table, batch):
    """The keys that a sequence may have."""
    pages, page = k.shape[:2]
    if table is not None:
        check.shape(f"{op}: block_table", table, (batch, None))
        check.last_dim_contiguous(f"{op}: block_table", table)
    elif pages != batch:
        raise ValueError(f"{op}: k_cache has {pages} rows for {batch} sequences; allowed without block_table is one "
                         "each")
    capacity = page if table is None else page * table.shape[1]
    if capacity >= FARTHEST:
        raise NotImplementedError(f"{op}: k_cache has room for {capacity} keys of a sequence, supported are fewer than "
                                  "2^30")


def _written(op, out, shape, dtype):
    check.shape(f"{op}: out", out, shape)
    if out.dtype != dtype:
        raise TypeError(f"{op}: out is {out.dtype}, results are {dtype}")


def _supported(op, q, v):
    try:
        DecodeSpec(dtypes.name_of(q.dtype), q.shape[-1], v.shape[3])
    except NotImplementedError as problem:
        raise NotImplementedError(f"{op}: q is {tuple(q.shape)}, v_cache is {tuple(v.shape)}: {problem}") from None


def tasks(op, batch, of) -> None:
    """NotImplementedError for more than a plan can count. batch: sequences of the plan."""
    found = batch * of.heads_kv * of.count_tiles()
    if found > MOST_TASKS:
        raise NotImplementedError(f"{op}: {batch} sequences of {of.heads_kv} K/V heads are {found} tasks, supported "
                                  f"are up to {MOST_TASKS}")


def check_layouts(call: Call, out=None, op: str = OP) -> None:
    """What copies of 16 bytes cannot take; an out that must not be written to."""
    check_out(call, out, op)
    check.rows_of_16_bytes(op, empty=True, q=call.q, k_cache=call.k_cache, v_cache=call.v_cache)


def check_out(call: Call, out, op: str = OP) -> None:
    """The same of out alone, which the op's way asks too before it copies: it writes nothing that a launch would not.
    Dynamo traces no addresses."""
    if out is not None:
        check.refuse_overlap(op, out=out)
        if not torch.compiler.is_dynamo_compiling():
            check.refuse_inference(op, out=out)
            memory.refuse_shared(op, {"out": out}, call._asdict())
            check.rows_of_16_bytes(op, out=out)


def only_causal(call: Call, options: Options) -> None:
    """NotImplementedError for ragged queries that see keys behind their own, and for a window beside a tree mask."""
    if call.tree_mask is not None and max(options.left, options.right) >= 0:
        raise NotImplementedError(f"{OP}: tree_mask is given, and window_size; a window of drafts is not supported")
    if call.cu_seqlens_q is not None and not options.causal:
        raise NotImplementedError(f"{OP}: cu_seqlens_q is given, causal is False; ragged queries are causal")
