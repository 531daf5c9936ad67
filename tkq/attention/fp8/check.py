"""What a caller may pass to flash_attn_fp8 and flash_attn_fp8_varlen."""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from tkq.attention.fp8.spec import Fp8Spec
from tkq.runtime import arguments
from tkq.runtime.call import check, dtypes

OP, PACKED = "flash_attn_fp8", "flash_attn_fp8_varlen"
OPEN = (None, None)  # the default window_size
VECTOR = 16  # elements of 16 bytes
FURTHEST = 1 << 30  # rows are fewer


def _of_both(*names):
    return {op: arguments.checker(op, *names) for op in (OP, PACKED)}


flags, numbers = _of_both("causal", "return_lse"), _of_both("softmax_scale")
limits, words = _of_both("window_size"), _of_both("accumulate", "out_dtype")
longest = arguments.checker(PACKED, "max_seqlen_q", "max_seqlen_k")
_tensors = _of_both("q", "k", "v", "q_descale", "k_descale", "v_descale")
_lengths = arguments.checker(PACKED, "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table")


class Call(NamedTuple):
    """The tensors of a call, in the order of the op's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Optional[Tensor] = None
    k_descale: Optional[Tensor] = None
    v_descale: Optional[Tensor] = None

    @property
    def descales(self) -> dict:
        """By their letters, those that are given."""
        found = dict(zip("qkv", self[3:], strict=True))
        return {name: x for name, x in found.items() if x is not None}

    @property
    def keys_contiguous(self) -> bool:
        """Are v's keys contiguous, and not its columns?"""
        return self.v.stride(3) != 1


class Options(NamedTuple):
    """left, right: -1 without a limit; causal means a right of 0."""

    causal: bool = False
    softmax_scale: Optional[float] = None
    left: int = -1
    right: int = -1
    accumulate: str = "two_level"
    out_dtype: torch.dtype = torch.bfloat16
    return_lse: bool = False


class Lengths(NamedTuple):
    """Of packed sequences, as flash_attn_fp8_varlen takes them. cu_seqlens_k: None where there is a block_table."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Optional[Tensor]
    seqused_q: Optional[Tensor] = None
    seqused_k: Optional[Tensor] = None
    block_table: Optional[Tensor] = None
    max_seqlen_q: int = 4096
    max_seqlen_k: int = 4096

    # methods, not properties: Dynamo of torch 2.9 reads no property of a NamedTuple

    def tensors(self) -> dict:
        """By name, those that are given."""
        return {name: x for name, x in zip(self._fields[:5], self[:5], strict=True) if x is not None}

    def number(self) -> int:
        """Of sequences."""
        return self.cu_seqlens_q.shape[0] - 1


def check_options(options: Options, op: str = OP) -> None:
    """Of the op, whose arguments come past the public function."""
    flags[op](options.causal, options.return_lse)
    numbers[op](options.softmax_scale)
    limits[op]((options.left, options.right))
    words[op](options.accumulate, options.out_dtype)


def check_call(call: Call) -> None:
    """Raises what flash_attn_fp8 promises of its tensors."""
    _check_tensors(OP, call, 4, lambda: call.q.shape[0])


def check_packed(call: Call, lengths: Lengths) -> None:
    """Raises what flash_attn_fp8_varlen promises of its tensors, but for the values of cu_seqlens and seqused."""
    _lengths(*lengths[:5])
    given = lengths.tensors()
    _check_keys(lengths)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in given:
            check.rank(f"{PACKED}: {name}", given[name], 1)
    _check_tensors(PACKED, call, 3, lengths.number, lengths.block_table is not None)
    count = lengths.number() + 1
    if not count or given.get("cu_seqlens_k", lengths.cu_seqlens_q).shape[0] != count:
        raise ValueError(f"{PACKED}: cu_seqlens_q has {count} numbers, cu_seqlens_k "
                         f"{given.get('cu_seqlens_k', lengths.cu_seqlens_q).shape[0]}; allowed is one more than "
                         "sequences, for both the same")
    for name in ("seqused_q", "seqused_k"):
        if name in given:
            check.shape(f"{PACKED}: {name}", given[name], (lengths.number(),))
    if "block_table" in given:
        check.shape(f"{PACKED}: block_table", given["block_table"], (lengths.number(), None))
    check.same_device(q=call.q, **given)
    longest(*lengths[5:])


def _check_keys(lengths):
    """Packed ones, or those of pages."""
    _, cu_k, _, used, table = lengths[:5]
    if table is None and cu_k is None:
        raise TypeError(f"{PACKED}: cu_seqlens_k: got NoneType, expected a torch.Tensor where block_table is None")
    if table is not None and cu_k is not None:
        raise ValueError(f"{PACKED}: cu_seqlens_k and block_table are given, allowed is one of them")
    if table is not None and used is None:
        raise ValueError(f"{PACKED}: seqused_k is None, with block_table it is needed")


def _check_tensors(op, call, rank, sequences, paged=False):
    """sequences: how many there are, asked when ranks are known to be right. paged: k and v are pages."""
    q, k, v, *descales = call
    _tensors[op](*call)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.rank(f"{op}: {name}", x, rank if name == "q" else rank + paged)
    check.same_device(**call._asdict())
    *batch, _, H, D = q.shape
    batch = [None] if paged else batch
    try:
        Fp8Spec(D)
    except NotImplementedError as problem:
        raise NotImplementedError(f"{str(problem).replace(OP, op, 1)}: q is {tuple(q.shape)}") from None
    check.shape(f"{op}: k", k, (*batch, None, None, D))
    check.shape(f"{op}: v", v, tuple(k.shape))
    heads = k.shape[-2]
    if H and (not heads or H % heads):
        raise ValueError(f"{op}: q has {H} heads, k has {heads}; q's must be a multiple of k's")
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if x is not None:
            check.shape(f"{op}: {name}", x, (sequences(), heads))


def check_layouts(call: Call, op: str = OP) -> None:
    """What TMA, and loads of 16 bytes, cannot take: strides and addresses."""
    either = op == OP  # of dense tensors alone v may have its keys side by side
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        if not x.numel():
            continue
        if x.shape[1 if either else 0] >= FURTHEST:  # also of few numbers, expanded: rows are counted in int32
            raise NotImplementedError(f"{op}: {name} is {tuple(x.shape)}, supported are fewer than 2^30 rows")
        line = 1 if either and name == "v" and call.keys_contiguous else x.dim() - 1
        if x.stride(line) != 1 and x.shape[line] > 1:
            others = ", or its dimension of keys" if either and name == "v" else ""
            raise ValueError(f"{op}: {name}: strides are {x.stride()}; its last dimension{others} must be contiguous: "
                             "call .contiguous()")
        check.strides_of_16_bytes(op, name, x, line)


def check_lines(lengths: Lengths) -> None:
    """That cu_seqlens, seqused and rows of the block_table are contiguous."""
    for name, x in lengths.tensors().items():
        check.last_dim_contiguous(f"{PACKED}: {name}", x)


def check_first(lengths: Lengths) -> None:
    """Of CPU tensors: that cu_seqlens begin with 0. A GPU's would have to be waited for."""
    for name, x in zip(lengths._fields[:2], lengths[:2], strict=True):
        if x is not None and int(x[0]):
            raise ValueError(f"{PACKED}: {name} begins with {int(x[0])}, allowed is 0: pass only the rows of the "
                             "sequences that are meant, and count from the first")


def spec_of(call: Call, options: Options, long_window: int, lengths: Optional[Lengths] = None) -> Fp8Spec:
    """long_window: from where on a limit on the left is far. lengths: of packed sequences."""
    left, right = options.left >= 0, options.right >= 0
    packed = {} if lengths is None else dict(varlen=True, seqused_q=lengths.seqused_q is not None,
                                             seqused_k=lengths.seqused_k is not None)
    return Fp8Spec(call.q.shape[-1], options.causal, options.return_lse, dtypes.name_of(options.out_dtype),
                   options.accumulate, "".join(call.descales), left, right, left and options.left >= long_window,
                   **packed)
