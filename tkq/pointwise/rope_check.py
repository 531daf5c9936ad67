"""What a call of tkq.rope rotates by, and everything that can be wrong with one."""
from typing import NamedTuple, Optional

from torch import Tensor

from ..runtime import arguments
from ..runtime.call import check
from .spec import INDEX, MAX_ROTARY_DIM

_TABLES = "cos", "sin", "position_ids", "cu_seqlens"
_TENSORS = {"rope": arguments.checker("rope", "x", *_TABLES),
            "rope_qk": arguments.checker("rope_qk", "q", "k", *_TABLES)}
options = {"rope": arguments.checker("rope", "interleaved", "inplace"),
           "rope_qk": arguments.checker("rope_qk", "interleaved")}
offsets = {op: arguments.checker(op, "seqlen_offsets") for op in options}
_longest = {op: arguments.checker(op, "max_seqlen") for op in options}
_inner = arguments.checker("rope", "interleaved", "seqlen_offsets")


class Rotation(NamedTuple):
    """By what angles a call rotates: every argument of the ops but x (or q and k)."""

    cos: Tensor
    sin: Tensor
    offset: int
    offsets: Optional[Tensor]
    position_ids: Optional[Tensor]
    cu_seqlens: Optional[Tensor]
    interleaved: bool
    inverse: bool


def check_call(tensors, rotation):
    """Raises what the public functions promise. tensors: x, or q and k."""
    op, names = ("rope", ("x",)) if len(tensors) == 1 else ("rope_qk", ("q", "k"))
    _TENSORS[op](*tensors, rotation.cos, rotation.sin, rotation.position_ids, rotation.cu_seqlens)
    _inner(rotation.interleaved, rotation.offset)
    for name, x in zip(names, tensors, strict=True):
        check.rank(name, x, 3, 4)
        check.last_dim_contiguous(name, x)
    x, last = tensors[0], tensors[-1]
    if last.dtype != x.dtype:
        raise TypeError(f"rope_qk: k is {last.dtype}, q is {x.dtype}; both must have one dtype")
    if last.shape[:-2] != x.shape[:-2] or last.shape[-1] != x.shape[-1]:
        raise ValueError(f"rope_qk: k has shape {tuple(last.shape)}, q {tuple(x.shape)}; only heads may differ")
    _check_table(x, rotation.cos, rotation.sin)
    _check_positions(x, rotation)
    check.same_device(**dict(zip(names, tensors, strict=True)), cos=rotation.cos, sin=rotation.sin,
                      seqlen_offsets=rotation.offsets, position_ids=rotation.position_ids,
                      cu_seqlens=rotation.cu_seqlens)


def _check_table(x, cos, sin):
    for name, t in (("cos", cos), ("sin", sin)):
        check.rank(name, t, 2, 3)
        check.last_dim_contiguous(name, t)
    if sin.dtype != cos.dtype or sin.shape != cos.shape:
        raise ValueError(f"rope: sin is {tuple(sin.shape)} {sin.dtype}, cos {tuple(cos.shape)} {cos.dtype}; they must "
                         "agree")
    if not 1 <= cos.shape[-1] <= x.shape[-1] // 2:
        raise ValueError(f"rope: cos: last dimension is {cos.shape[-1]}, allowed are 1 to {x.shape[-1] // 2}, half the "
                         f"columns that rotate; of a table with both halves pass cos[..., :R // 2]")
    if 2 * cos.shape[-1] > MAX_ROTARY_DIM:
        raise NotImplementedError(f"rope: cos: last dimension is {cos.shape[-1]}, supported are up to "
                                  f"{MAX_ROTARY_DIM // 2}")
    tokens = x.shape[:-2] if x.dim() == 4 else (1, *x.shape[:-2])
    if cos.dim() == 3 and cos.shape[:2] != tokens and (1, *cos.shape[1:2]) != (cos.shape[0], *tokens[1:]):
        raise ValueError(f"rope: cos: shape is {tuple(cos.shape)}, expected ({tokens[0]} or 1, {tokens[1]}, R / 2): a "
                         "row for each token")


def _check_positions(x, rotation):
    tokens, starts = tuple(x.shape[:-2]), rotation.cu_seqlens
    given = [name for name, is_given in (
        ("a table with a row for each token", rotation.cos.dim() == 3),
        ("position_ids", rotation.position_ids is not None),
        ("seqlen_offsets", rotation.offsets is not None or rotation.offset != 0)) if is_given]
    if len(given) > 1:
        raise ValueError(f"rope: got {' and '.join(given)}; one of them names the positions")
    if starts is not None:
        others = [name for name in given if name != "seqlen_offsets"]
        if len(tokens) != 1 or others:
            other = others[0] if others else "x (B, S, H, D)"
            raise ValueError(f"rope: cu_seqlens: goes with x (total, H, D), and not with {other}")
        if starts.dim() != 1 or starts.shape[0] < 2 or starts.stride(0) != 1:
            raise ValueError(f"rope: cu_seqlens: got shape {tuple(starts.shape)}, strides {starts.stride()}; expected "
                             "(B + 1,), contiguous, B of 1 and more")
    elif len(tokens) == 1 and not (rotation.cos.dim() == 3 or rotation.position_ids is not None):
        raise ValueError("rope: x has 3 dimensions: cu_seqlens or position_ids is needed")
    if rotation.position_ids is not None:
        _check_ids(rotation.position_ids, tokens)
    if rotation.offsets is not None:
        check.dtype("seqlen_offsets", rotation.offsets, INDEX)
        check.shape("seqlen_offsets", rotation.offsets, (x.shape[0] if starts is None else starts.shape[0] - 1,))
    _check_offset(rotation, tokens)
    if not rotation.cos.shape[-2] and x.numel():
        raise ValueError(f"rope: cos: got shape {tuple(rotation.cos.shape)}, allowed are tables of 1 row and more")


def _check_ids(ids, tokens):
    allowed = (tokens, (1, *tokens[1:]), tokens[1:]) if len(tokens) == 2 else (tokens,)
    if tuple(ids.shape) not in allowed:
        raise ValueError(f"rope: position_ids: shape is {tuple(ids.shape)}, expected one of {allowed}")


def _check_offset(rotation, tokens):
    offset, rows = rotation.offset, rotation.cos.shape[-2]
    if len(tokens) == 2 and rotation.position_ids is None and rotation.offsets is None and offset + tokens[1] > rows:
        raise ValueError(f"rope: cos: has {rows} rows; {tokens[1]} tokens from position {offset} need "
                         f"{offset + tokens[1]}")


def check_longest(op, max_seqlen, cu_seqlens):
    """max_seqlen, as a plain number."""
    max_seqlen = _longest[op](max_seqlen)
    if cu_seqlens is None:
        raise ValueError(f"{op}: max_seqlen: got {max_seqlen}, which goes with cu_seqlens, and there are none")
    return max_seqlen
