"""tkq.kv_append: what PyTorch sees."""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from tkq.attention.decode import launch
from tkq.reference import decode as reference
from tkq.runtime import arguments
from tkq.runtime.call import check, memory, ops

OP = "kv_append"
_tensors = arguments.checker(OP, "k", "v", "k_cache", "v_cache", "slot_mapping", "cos", "sin", "positions", "q",
                             "k_scale", "v_scale")
_flag = arguments.checker(OP, "interleaved")
MOST = 1 << 31
MOST_OF_WARP, MOST_ROWS = 256, MOST // 32  # where a warp has a row: columns; of k, v and q


class Call(NamedTuple):
    """In the order of the op's arguments."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    cos: Optional[Tensor] = None
    sin: Optional[Tensor] = None
    interleaved: bool = False
    positions: Optional[Tensor] = None
    q: Optional[Tensor] = None
    k_scale: Optional[Tensor] = None
    v_scale: Optional[Tensor] = None

    def tensors(self) -> dict:
        return {name: x for name, x in self._asdict().items() if name != "interleaved"}


def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *,
              cos: Optional[Tensor] = None, sin: Optional[Tensor] = None, interleaved: bool = False,
              positions: Optional[Tensor] = None, q: Optional[Tensor] = None, k_scale: Optional[Tensor] = None,
              v_scale: Optional[Tensor] = None) -> Optional[Tensor]:
    """Keys and values of new tokens into a paged cache, keys and queries rotated, and keys and values quantised on the
    way: one launch.

    Args:
        k, v: (T, Hk, D) and (T, Hk, Dv), bf16, fp16 or fp32, D and Dv multiples of 8. Rows of 16-byte multiples go in
            as they lie, slices of a packed projection among them; others are copied first.
        k_cache, v_cache: (N, page, Hk, D) and (N, page, Hk, Dv), pages of any size, as k or float8_e4m3fn; the last
            dimension contiguous, base and other strides multiples of 16 bytes. Written to.
        slot_mapping: (T,) int32 or int64: where each token goes, page * page size + row. A token whose slot the cache
            does not have, -1 for example, is not written. No two tokens may have one slot.
        cos, sin: (P, R / 2), bf16, fp16 or fp32, of angles as ``tkq.rope_cos_sin`` makes them: the first R columns of
            each head are rotated, the others stay. R is a multiple of 16, at most D; with interleaved of 8.
        interleaved: pairs are neighbouring columns; otherwise columns i and i + R / 2.
        positions: (T,) int32 or int64, with cos: the row of the table for each token. One that the table does not have
            gives NaN.
        q: (T, H, D), as k, with cos: is rotated, too.
        k_scale, v_scale: float32, of float8 caches: a cache's number times its scale is meant. (Hk,), above 0: what
            keys and values are divided by; what is beyond 448 then becomes 448. (N, page, Hk): written to, for each
            token and head its largest number by 448, at least 2^-126, for D and Dv up to 256. Both or none: 1.

    Returns:
        q rotated, contiguous; None without q.

    Raises:
        TypeError: k, v, cos, sin or q is no dense tensor of bf16, fp16 or fp32; k_cache or v_cache is no dense tensor
            of bf16, fp16, fp32 or e4m3; slot_mapping or positions is no dense tensor of int32 or int64; interleaved is
            no bool; k_scale or v_scale is no dense tensor of fp32; dtypes that differ.
        ValueError: shapes that do not go together, devices that differ, one of cos, sin and positions without the
            others, q without them, scales without a float8 cache or without each other, caches or scales whose elements
            share memory, among each other or with another tensor, strides of caches that are no multiple of 16 bytes.
        NotImplementedError: a D, Dv or R that is not supported; 2^31 keys in a cache or elements in k, v and q
            together, and more, or with scales that are written 2^26 rows of these; a tensor that requires a gradient,
            with gradients enabled: there is none.
        RuntimeError: a GPU other than Hopper; a cache made under torch.inference_mode that is written to outside.

    Source: Kwon et al., Efficient memory management for large language model serving with PagedAttention, 2023. CPU
    tensors take ``tkq.reference.decode``, by the same rules.

    Example::

        k, v = torch.randn(2, 3, 2, 64, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(3, 8, 64, device="cuda", dtype=torch.bfloat16)
        k_cache, v_cache = torch.zeros(2, 10, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
        cos, sin = tkq.rope_cos_sin(100, 64, device="cuda")
        slots = torch.tensor([17, 40, -1], device="cuda")  # the last token is not written
        angles = dict(cos=cos, sin=sin, positions=torch.tensor([33, 8, 0], device="cuda"))
        q = tkq.kv_append(k, v, k_cache, v_cache, slots, **angles, q=q)  # (3, 8, 64) bfloat16
    """
    interleaved = _flag(interleaved)
    call = Call(k, v, k_cache, v_cache, slot_mapping, cos, sin, interleaved, positions, q, k_scale, v_scale)
    if ops.direct(*call.tensors().values()):
        return (_run if k.is_cuda else _run_cpu)(call)
    check.refuse_gradient(OP, **call.tensors())
    _look(call)  # the dispatcher's words name no argument
    if not ops.traced():  # which has no addresses
        _look_at_memory(call)
    found = _op(*call._replace(k_scale=_of_heads(call.k_scale), v_scale=_of_heads(call.v_scale)))
    return None if q is None else found


def _of_heads(scale):
    """A scale as the op takes it. The op says that it writes to scales: those of heads, which it only reads, may then
    share no elements, be no negative view and no zeros without memory."""
    if scale is None or scale.dim() != 1:
        return scale
    if not ops.traced() and scale._is_zerotensor():
        return scale.clone()
    return scale.resolve_neg().contiguous()


def _look(call):
    """Raises what kv_append promises of its tensors."""
    k, v, k_cache, v_cache, slots, q = *call[:5], call.q
    _tensors(*call.tensors().values())
    check.rank(f"{OP}: k", k, 3)
    T, Hk, D = k.shape
    check.shape(f"{OP}: v", v, (T, Hk, None))
    check.shape(f"{OP}: k_cache", k_cache, (None, None, Hk, D))
    check.shape(f"{OP}: v_cache", v_cache, (*k_cache.shape[:2], Hk, v.shape[2]))
    check.shape(f"{OP}: slot_mapping", slots, (T,))
    for name, x in (("v", v), ("k_cache", k_cache), ("q", q)):
        if x is not None and x.dtype != k.dtype and not (name == "k_cache" and x.dtype == torch.float8_e4m3fn):
            raise TypeError(f"{OP}: {name} is {x.dtype}, k is {k.dtype}; all must have one dtype, but that caches "
                            "may be float8_e4m3fn")
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"{OP}: v_cache is {v_cache.dtype}, k_cache is {k_cache.dtype}; both must have one dtype")
    if D % 8 or v.shape[2] % 8:
        raise NotImplementedError(f"{OP}: k has rows of {D}, v of {v.shape[2]}; supported are multiples of 8")
    _rotation(call, T, D)
    _scales(call)
    check.same_device(**call.tensors())
    size = sum(0 if x is None else x.numel() for x in (k, v, q))
    if size >= MOST or k_cache.shape[0] * k_cache.shape[1] >= MOST:
        raise NotImplementedError(f"{OP}: k, v and q have {size} elements, k_cache has {k_cache.shape[0]} pages of "
                                  f"{k_cache.shape[1]}; supported are fewer than 2^31 elements, and keys")
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    if k_cache is v_cache or (call.k_scale is call.v_scale and _written_scales(call)):
        raise ValueError(f"{OP}: {'k_cache and v_cache' if k_cache is v_cache else 'k_scale and v_scale'} are one "
                         "tensor, which is written; expected two")
    for name, x in caches.items():
        check.settled(f"{OP}: {name}", x)
        unit = max(8, 16 // x.element_size())
        if x.numel() and (x.stride(3) != 1 or any(x.stride(i) % unit and x.shape[i] > 1 for i in range(3))):
            raise ValueError(f"{OP}: {name}: strides are {x.stride()}; the last must be 1, the others multiples of "
                             f"{unit} elements (16 bytes)")
    check.refuse_overlap(OP, **caches, **_written_scales(call))


def _look_at_memory(call):
    """Of tensors that have some: what is written lies apart from the rest, and was not made for inference alone."""
    written = {"k_cache": call.k_cache, "v_cache": call.v_cache, **_written_scales(call)}
    check.refuse_inference(OP, **written)
    memory.refuse_shared(OP, written, {name: x for name, x in call.tensors().items() if name not in written})


def _written_scales(call) -> dict:
    """Scales that are results."""
    found = {"k_scale": call.k_scale, "v_scale": call.v_scale}
    return {name: x for name, x in found.items() if x is not None and x.dim() == 3}


def _scales(call):
    given, heads = {"k_scale": call.k_scale, "v_scale": call.v_scale}, call.k.shape[1]
    if all(x is None for x in given.values()):
        return
    if call.k_cache.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{OP}: {next(n for n, x in given.items() if x is not None)} is given, k_cache is "
                         f"{call.k_cache.dtype}; scales are of float8 caches")
    for name, x in given.items():
        if x is None:
            raise ValueError(f"{OP}: {name} is None; k_scale and v_scale go together")
        if not (check.fits(x, (heads,)) or check.fits(x, call.k_cache.shape[:3])):
            raise ValueError(f"{OP}: {name}: shape is {tuple(x.shape)}, allowed are {(heads,)}, which are given, and "
                             f"{tuple(call.k_cache.shape[:3])}, which are written")
    if call.k_scale.dim() != call.v_scale.dim():
        raise ValueError(f"{OP}: k_scale has {call.k_scale.dim()} dimensions, v_scale {call.v_scale.dim()}; both must "
                         "be given, or both written")
    if call.k_scale.dim() == 3 and (call.k.shape[2] > MOST_OF_WARP or call.v.shape[2] > MOST_OF_WARP):
        raise NotImplementedError(f"{OP}: k has rows of {call.k.shape[2]}, v of {call.v.shape[2]}; supported with "
                                  f"scales that are written are up to {MOST_OF_WARP}")
    rows = sum(0 if x is None else x.shape[0] * x.shape[1] for x in (call.k, call.v, call.q))
    if call.k_scale.dim() == 3 and rows >= MOST_ROWS:
        raise NotImplementedError(f"{OP}: k, v and q have {rows} rows; supported with scales that are written are "
                                  "fewer than 2^26")
    for name, x in _written_scales(call).items():
        check.settled(f"{OP}: {name}", x)


def _rotation(call, tokens, dim):
    cos, sin, positions, q = call.cos, call.sin, call.positions, call.q
    given = [x is not None for x in (cos, sin, positions)]
    if any(given) != all(given) or (q is not None and not all(given)):
        raise ValueError(f"{OP}: cos, sin and positions go together, and q with them; got "
                         f"{', '.join(n for n, x in call.tensors().items() if x is not None)}")
    if cos is None:
        return
    check.rank(f"{OP}: cos", cos, 2)
    check.shape(f"{OP}: sin", sin, tuple(cos.shape))
    check.shape(f"{OP}: positions", positions, (tokens,))
    if sin.dtype != cos.dtype:
        raise TypeError(f"{OP}: sin is {sin.dtype}, cos is {cos.dtype}; both must have one dtype")
    if q is not None:
        check.shape(f"{OP}: q", q, (tokens, None, dim))
    columns, unit = 2 * cos.shape[1], 8 if call.interleaved else 16
    if not 0 < columns <= dim or columns % unit:
        raise NotImplementedError(f"{OP}: cos has {cos.shape[1]} columns, which rotate {columns} of k's {dim}; "
                                  f"supported are multiples of {unit} up to them all")
    if not cos.shape[0]:
        raise ValueError(f"{OP}: cos has no rows, allowed are 1 and more")


def _changed(call):
    """Their versions: the launch is past the dispatcher."""
    for x in (call.k_cache, call.v_cache, *_written_scales(call).values()):
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _run(call):
    _look(call)
    _look_at_memory(call)
    found = launch.append(call)
    _changed(call)
    return found


def _run_cpu(call):
    _look(call)
    if call.k.is_meta:  # which has no numbers to look at
        return None if call.q is None else call.q.new_empty(call.q.shape)
    _look_at_memory(call)
    found = reference.kv_append(*call)
    return None if found is None else found.contiguous()


def _cuda_op(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, cos: Optional[Tensor],
             sin: Optional[Tensor], interleaved: bool, positions: Optional[Tensor], q: Optional[Tensor],
             k_scale: Optional[Tensor], v_scale: Optional[Tensor]) -> Tensor:
    found = _run(Call(k, v, k_cache, v_cache, slot_mapping, cos, sin, interleaved, positions, q, k_scale, v_scale))
    return k.new_empty(0) if found is None else found


def _cpu_op(*call):
    found = _run_cpu(Call(*call))
    return call[0].new_empty(0) if found is None else found


def _fake(*call):
    call = Call(*call)
    _look(call)
    return call.k.new_empty(0 if call.q is None else call.q.shape)


_op = ops.torch_op(OP, cuda=_cuda_op, cpu=_cpu_op, fake=_fake, mutates=("k_cache", "v_cache", "k_scale", "v_scale"))
