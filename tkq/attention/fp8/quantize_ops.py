"""tkq.quantize_qkv: what PyTorch sees."""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from tkq.attention.common.layout import readable
from tkq.attention.fp8 import launch
from tkq.attention.fp8.spec import MEAN_ROWS, QUANTIZED_TOGETHER, QuantizeSpec
from tkq.reference import attention_fp8 as reference
from tkq.reference.fp8 import SMALLEST_SCALE
from tkq.runtime import arguments
from tkq.runtime.call import check, dtypes, memory, ops

OP = "quantize_qkv"
_tensors = arguments.checker(OP, "q", "k", "v", "cos", "sin")
_flags = arguments.checker(OP, "rotate", "smooth_k")


class Call(NamedTuple):
    """In the order of the op's arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Optional[Tensor] = None
    sin: Optional[Tensor] = None
    rotate: bool = False
    smooth_k: bool = False


def quantize_qkv(q: Tensor, k: Tensor, v: Tensor, *, rotate: bool = False, smooth_k: bool = False,
                 cos: Optional[Tensor] = None, sin: Optional[Tensor] = None) -> tuple[Tensor, Tensor, Tensor, Tensor,
                                                                                      Tensor, Tensor]:
    """q, k and v of attention in float8 (e4m3), as ``tkq.flash_attn_fp8`` takes them, with a scale for each sequence
    and K/V head. On the way q and k may get their positions, and what a scale is wasted on may be taken out of them.

    Args:
        q: (B, Sq, H, D), bfloat16, float16 or float32, D a multiple of 8.
        k, v: (B, Sk, Hk, D), as q; H is a multiple of Hk: the query heads of a K/V head share a scale. Strides of
            16-byte multiples go in as they lie, of float32 of 32; others are copied first.
        rotate: q and k are multiplied by the orthonormal Hadamard matrix of D columns, 64, 128 or 256: a column that
            is far larger than the others is spread over all, and scores stay as they are.
        smooth_k: the mean of a sequence's tokens is subtracted from k, for each head: softmax stays as it is, where no
            other keys are added later; the log-sum-exp becomes less by softmax_scale * q @ mean.
        cos, sin: (rows, D / 2) float32, contiguous, D a multiple of 16, at least as many rows as tokens, Sq = Sk: q and
            k are rotated to their positions first, as by ``tkq.rope`` with these tables, but not rounded in between.

    Returns:
        (q, k, v, q_descale, k_descale, v_descale): the first three contiguous, of float8_e4m3fn; the others (B, Hk)
        float32, what they are multiplied by to be dequantised: the largest magnitude / 448, or 2 ** -126 for zeros.
        Where a sequence's head has a NaN its scale and its elements are NaN.

    Raises:
        TypeError: q, k or v is no dense tensor of bf16, fp16 or fp32; rotate or smooth_k is no bool; cos or sin is no
            dense tensor of fp32; dtypes that differ.
        ValueError: shapes that do not go together, devices that differ, one of cos and sin alone or not contiguous, a
            table too short, with tables an Sq that is not Sk.
        NotImplementedError: a D that is no multiple of 8, with tables of 16; with rotate one that is not 64, 128 or
            256; a tensor that requires a gradient, with gradients enabled: there is none.
        RuntimeError: a GPU other than Hopper.

    Each tensor is read twice: for its scales, and to be divided by them; with smooth_k k is read once more before, for
    its mean. CPU tensors take ``tkq.reference.attention_fp8.quantize_qkv``, by the same rules.

    Source: rotation: Shah et al., FlashAttention-3, 2024; smoothing of K: Zhang et al., SageAttention, 2024.

    Example::

        q = torch.randn(2, 256, 8, 128, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, 2, 256, 2, 128, device="cuda", dtype=torch.bfloat16)
        *qkv, a, b, c = tkq.quantize_qkv(q, k, v, rotate=True, smooth_k=True)
        o = tkq.flash_attn_fp8(*qkv, q_descale=a, k_descale=b, v_descale=c)  # (2, 256, 8, 128) bfloat16
        q8, a = tkq.quantize_qkv(q, k, v)[::3]  # (2, 256, 8, 128) float8_e4m3fn; (2, 2) float32
    """
    rotate, smooth_k = _flags(rotate, smooth_k)
    call = Call(q, k, v, cos, sin, rotate, smooth_k)
    if ops.direct(*call[:5]):
        return (_run if q.is_cuda else _run_cpu)(call)
    check.refuse_gradient(OP, q=q, k=k, v=v, cos=cos, sin=sin)
    _look(call)  # the dispatcher's words name no argument
    return _op(*call)


def _look(call):
    q, k, v, cos, sin, rotate, _ = call
    _tensors(*call[:5])
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.rank(f"{OP}: {name}", x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"{OP}: {name} is {x.dtype}, q is {q.dtype}; all three must have one dtype")
    check.same_device(q=q, k=k, v=v, cos=cos, sin=sin)
    B, _, H, D = q.shape
    check.shape(f"{OP}: k", k, (B, None, None, D))
    check.shape(f"{OP}: v", v, tuple(k.shape))
    heads = k.shape[2]
    if H and (not heads or H % heads):
        raise ValueError(f"{OP}: q has {H} heads, k has {heads}; q's must be a multiple of k's")
    if D % QUANTIZED_TOGETHER:
        raise NotImplementedError(f"{OP}: q has rows of {D}, supported are multiples of {QUANTIZED_TOGETHER}")
    if rotate:
        QuantizeSpec(rotate=D)
    if cos is not None or sin is not None:
        _look_at_tables(q, k, cos, sin)


def _look_at_tables(q, k, cos, sin):
    if cos is None or sin is None:
        raise ValueError(f"{OP}: {'cos' if cos is None else 'sin'} is None, the other table is given: both or none")
    D, rows = q.shape[3], k.shape[1]
    if D % (2 * QUANTIZED_TOGETHER):
        raise NotImplementedError(f"{OP}: q has rows of {D}, with cos and sin supported are multiples of "
                                  f"{2 * QUANTIZED_TOGETHER}")
    if q.shape[1] != rows:
        raise ValueError(f"{OP}: q has {q.shape[1]} tokens, k has {rows}; with cos and sin they must be the same ones")
    for name, x in (("cos", cos), ("sin", sin)):
        check.rank(f"{OP}: {name}", x, 2)
        check.shape(f"{OP}: {name}", x, (None, D // 2))
        if x.shape[0] < rows:
            raise ValueError(f"{OP}: {name} has {x.shape[0]} rows, {rows} tokens need as many")
        if not x.is_contiguous():
            raise ValueError(f"{OP}: {name}: strides are {x.stride()}; it must be contiguous: call .contiguous()")
    check.shape(f"{OP}: sin", sin, tuple(cos.shape))


def _look_at_addresses(call):
    """Of tables that have some: asked by what runs, as torch.compile, torch.export and torch.func show none."""
    for name, x in (("cos", call.cos), ("sin", call.sin)):
        if x is not None and x.numel() and memory.address(x) % 16:
            raise ValueError(f"{OP}: {name}: begins at an address that is not a multiple of 16 bytes: call .clone()")


def _empty(call):
    """Of no contents yet; descales of one tensor, in one memory."""
    made = [x.new_empty(x.shape, dtype=torch.float8_e4m3fn) for x in call[:3]]
    return made, call.q.new_empty(3, call.q.shape[0], call.k.shape[2], dtype=torch.float32)


def _run(call):
    """Of CUDA tensors."""
    _look(call)
    _look_at_addresses(call)
    made, descale = _empty(call)
    if descale.numel() and (call.q.numel() or call.k.numel()):
        largest, sums = torch.zeros_like(descale, dtype=torch.int32), (None, None)
        if call.smooth_k:
            B, rows, heads, D = call.k.shape
            of = descale.new_empty(-(-rows // MEAN_ROWS) + 1, B, heads, D)
            sums = of[1:], of[0]
        q, k, v = (readable(x) for x in call[:3])
        spec = QuantizeSpec(dtypes.name_of(q.dtype), q.shape[3] if call.rotate else 0, call.smooth_k,
                            call.cos is not None)
        launch.launcher(q, spec)(q, (k, v, *made, descale, largest, *sums, call.cos, call.sin))
    else:
        descale.fill_(SMALLEST_SCALE)
    return *made, *descale.unbind()


def _run_cpu(call):
    _look(call)
    _look_at_addresses(call)
    made, descale = _empty(call)
    if not call.q.is_meta:  # which has no numbers to look at
        for x, y in zip((*made, *descale.unbind()), reference.quantize_qkv(*call), strict=True):
            x.copy_(y)
    return *made, *descale.unbind()


# Results of an op may share no memory: each descale has its own.


def _apart(found):
    return *found[:3], *(x.clone() for x in found[3:])


def _cuda_op(q: Tensor, k: Tensor, v: Tensor, cos: Optional[Tensor], sin: Optional[Tensor], rotate: bool,
             smooth_k: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _apart(_run(Call(q, k, v, cos, sin, rotate, smooth_k)))


def _cpu_op(*given):
    return _apart(_run_cpu(Call(*given)))


def _fake(*given):
    call = Call(*given)
    _look(call)
    made, descale = _empty(call)
    return *made, *(x.new_empty(x.shape) for x in descale)


_op = ops.torch_op(OP, cuda=_cuda_op, cpu=_cpu_op, fake=_fake)
