"""What a caller may pass to flash_attn and flash_attn_varlen: checked when something is wrong, and before tracing."""
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from tkq.attention.kernels import spec_of
from tkq.runtime import arguments
from tkq.runtime.call import autocast, check, dtypes


class Options(NamedTuple):
    """All but the tensors: left and right are -1 without a limit, causal means that right is 0. The ops carry it as a
    plain tuple, which takes a fifth of the time to make."""

    causal: bool = False
    softmax_scale: Optional[float] = None
    left: int = -1
    right: int = -1
    softcap: float = 0.0


PLAIN = Options()


class Lengths(NamedTuple):
    """Of varlen's sequences; see ``flash_attn_varlen``. The first four are what the kernel takes."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Optional[Tensor] = None
    seqused_k: Optional[Tensor] = None
    max_seqlen_q: int = 1 << 20
    max_seqlen_k: int = 4096


_END = check.FLOAT32_END
OPEN = (None, None)  # the default window_size
FURTHEST = 1 << 30  # limits are below it


def _of_both(*names):
    return {op: arguments.checker(op, *names) for op in ("flash_attn", "flash_attn_varlen")}


flags = _of_both("causal", "deterministic", "return_lse")
limits = _of_both("window_size")  # (left, right), -1 for no limit
numbers = _of_both("softmax_scale", "softcap")
longest = arguments.checker("flash_attn_varlen", "max_seqlen_q", "max_seqlen_k")
_causal, _tensors = _of_both("causal"), _of_both("q", "k", "v", "sinks")
_lengths = arguments.checker("flash_attn_varlen", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def lowered(q, k, v, sinks):
    """Under torch.autocast: as products are cast, and sinks that are not float32, which they may be beside any type."""
    q, k, v, others = autocast.lowered(q, k, v, sinks)
    return q, k, v, sinks if sinks is None or sinks.dtype == torch.float32 else others


def refuse_out_of_range(softmax_scale, softcap):
    """ValueError, without words, for numbers that may not go to a launch: ``check_options`` has the words."""
    if not ((softmax_scale is None or 0 < softmax_scale < _END) and 0 <= softcap < _END):
        raise ValueError


def refuse_limits(left, right):
    """The same for a window, which could not be looked at where it was traced (``check.is_traced``)."""
    if not (-1 <= left < FURTHEST and -1 <= right < FURTHEST):
        raise ValueError


def check_options(op, options: Options):
    """op: of a forward, or of its gradient."""
    table = _table(op)
    _causal[table](options.causal)
    limits[table]((options.left, options.right))
    numbers[table](options.softmax_scale, options.softcap)


def _table(op):
    """The public function whose arguments an op's are."""
    return "flash_attn_varlen" if "varlen" in op else "flash_attn"


def check_operands(op, q, k, v, sinks, rank):
    """q ([B,] Sq, H, D), k ([B,] Sk, Hk, D), v ([B,] Sk, Hk, Dv) and sinks (H,) or None: types, ranks, shapes."""
    _tensors[_table(op)](q, k, v, sinks)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.rank(name, x, rank)
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} is {x.dtype}, q is {q.dtype}; all three must have one dtype")
    if sinks is not None:
        check.dtype("sinks", sinks, ("fp32", dtypes.name_of(q.dtype)))
        check.shape("sinks", sinks, (q.shape[-2],))
    check.same_device(q=q, k=k, v=v, sinks=sinks)
    heads, head_dim, kv_heads = q.shape[-2], q.shape[-1], k.shape[-2]
    try:
        spec_of(dtypes.name_of(q.dtype), head_dim, v.shape[-1])
    except NotImplementedError as problem:
        raise NotImplementedError(f"{problem}: q is {tuple(q.shape)}, v is {tuple(v.shape)}") from None
    lead = "B, " * (rank - 3)
    if k.shape[-1] != head_dim or k.shape[:-3] != q.shape[:-3]:
        batch = f"B = {q.shape[0]} and " if rank == 4 else ""
        raise ValueError(f"{op}: k is {tuple(k.shape)}, q is {tuple(q.shape)}; "
                         f"allowed is ({lead}Sk, Hk, D) with q's {batch}D = {head_dim}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"{op}: v is {tuple(v.shape)}, k is {tuple(k.shape)}; allowed is ({lead}Sk, Hk, Dv) with k's "
                         "sizes but for the last")
    if heads and (not kv_heads or heads % kv_heads):
        raise ValueError(f"{op}: q has {heads} heads, k has {kv_heads}; q's must be a multiple of k's")


def check_layouts(op, **tensors: Any):
    """What TMA and plain loads cannot take: strides and addresses."""
    rows = {}
    for name, x in tensors.items():
        if x is None or not isinstance(x, Tensor):
            continue
        if x.dim() == 1:
            check.last_dim_contiguous(f"{op}: {name}", x)
            continue
        if x.shape[-3] >= FURTHEST:  # also of few numbers, expanded: rows are counted in int32
            raise NotImplementedError(f"{op}: {name} is {tuple(x.shape)}, supported are fewer than 2^30 rows")
        rows[name] = x
    check.rows_of_16_bytes(op, **rows)


def check_sequences(op, q, lengths: Lengths):
    """cu_seqlens (B + 1,) and seqused (B,) or None, int32 on q's device. Their values are looked at on the CPU only: a
    GPU's would have to be waited for."""
    cu_q, cu_k, seqused_q, seqused_k, max_q, max_k = lengths
    _lengths(cu_q, cu_k, seqused_q, seqused_k)
    cu = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    for name, x in cu.items():
        check.rank(name, x, 1)
    if not cu_q.shape[0] or cu_q.shape != cu_k.shape:
        raise ValueError(f"{op}: cu_seqlens_q has {cu_q.shape[0]} numbers, cu_seqlens_k {cu_k.shape[0]}; allowed is "
                         "one more than sequences, for both the same")
    used = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    for name, x in used.items():
        if x is not None:
            check.shape(name, x, (cu_q.shape[0] - 1,))
    check.same_device(q=q, **cu, **used)
    longest(max_q, max_k)


def check_first(op, lengths: Lengths):
    """Of CPU tensors: that cu_seqlens begin with 0."""
    for name, x in (("cu_seqlens_q", lengths[0]), ("cu_seqlens_k", lengths[1])):
        if int(x[0]):
            raise ValueError(f"{op}: {name} begins with {int(x[0])}, allowed is 0: pass only the rows of the sequences "
                             "that are meant, and count from the first")
