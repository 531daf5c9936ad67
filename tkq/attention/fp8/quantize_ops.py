"""tkq.quantize_qkv: what PyTorch sees."""
import torch
from torch import Tensor

from tkq.attention.common.layout import readable
from tkq.attention.fp8 import launch
from tkq.attention.fp8.spec import QUANTIZED_TOGETHER, QuantizeSpec
from tkq.reference import attention_fp8 as reference
from tkq.reference.fp8 import SMALLEST_SCALE
from tkq.runtime import arguments
from tkq.runtime.call import check, dtypes, ops

OP = "quantize_qkv"
_tensors = arguments.checker(OP, "q", "k", "v")


def quantize_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k and v of attention in float8 (e4m3), as ``tkq.flash_attn_fp8`` takes them, with a scale for each sequence
    and K/V head.

    Args:
        q: (B, Sq, H, D), bfloat16, float16 or float32, D a multiple of 8.
        k, v: (B, Sk, Hk, D), as q; H is a multiple of Hk: the query heads of a K/V head share a scale. Strides of
            16-byte multiples go in as they lie, of float32 of 32; others are copied first.

    Returns:
        (q, k, v, q_descale, k_descale, v_descale): the first three contiguous, of float8_e4m3fn; the others (B, Hk)
        float32, what they are multiplied by to be dequantised: the largest magnitude / 448, or 2 ** -126 for zeros.
        Where a sequence's head has a NaN its scale and its elements are NaN.

    Raises:
        TypeError: q, k or v is no dense tensor of bf16, fp16 or fp32; dtypes that differ.
        ValueError: shapes that do not go together, devices that differ.
        NotImplementedError: a D that is no multiple of 8; a tensor that requires a gradient, with gradients enabled:
            there is none.
        RuntimeError: a GPU other than Hopper.

    Each tensor is read twice: for its scales, and to be divided by them. CPU tensors take
    ``tkq.reference.attention_fp8.quantize_qkv``, by the same rules.

    Example::

        q = torch.randn(2, 256, 8, 128, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, 2, 256, 2, 128, device="cuda", dtype=torch.bfloat16)
        *qkv, a, b, c = tkq.quantize_qkv(q, k, v)
        o = tkq.flash_attn_fp8(*qkv, q_descale=a, k_descale=b, v_descale=c)  # (2, 256, 8, 128) bfloat16
        q8, a = tkq.quantize_qkv(q, k, v)[::3]  # (2, 256, 8, 128) float8_e4m3fn; (2, 2) float32
    """
    if ops.direct(q, k, v):
        return (_run if q.is_cuda else _run_cpu)(q, k, v)
    check.refuse_gradient(OP, q=q, k=k, v=v)
    _look(q, k, v)  # the dispatcher's words name no argument
    return _op(q, k, v)


def _look(q, k, v):
    _tensors(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check.rank(f"{OP}: {name}", x, 4)
        if x.dtype != q.dtype:
            raise TypeError(f"{OP}: {name} is {x.dtype}, q is {q.dtype}; all three must have one dtype")
    check.same_device(q=q, k=k, v=v)
    B, _, H, D = q.shape
    check.shape(f"{OP}: k", k, (B, None, None, D))
    check.shape(f"{OP}: v", v, tuple(k.shape))
    heads = k.shape[2]
    if H and (not heads or H % heads):
        raise ValueError(f"{OP}: q has {H} heads, k has {heads}; q's must be a multiple of k's")
    if D % QUANTIZED_TOGETHER:
        raise NotImplementedError(f"{OP}: q has rows of {D}, supported are multiples of {QUANTIZED_TOGETHER}")


def _empty(q, k, v):
    """Of no contents yet; descales of one tensor, in one memory."""
    made = [x.new_empty(x.shape, dtype=torch.float8_e4m3fn) for x in (q, k, v)]
    return made, q.new_empty(3, q.shape[0], k.shape[2], dtype=torch.float32)


def _run(q, k, v):
    """Of CUDA tensors."""
    _look(q, k, v)
    made, descale = _empty(q, k, v)
    if descale.numel() and (q.numel() or k.numel()):
        largest = torch.zeros_like(descale, dtype=torch.int32)
        q, k, v = (readable(x) for x in (q, k, v))
        launch.launcher(q, QuantizeSpec(dtypes.name_of(q.dtype)))(q, (k, v, *made, descale, largest))
    else:
        descale.fill_(SMALLEST_SCALE)
    return *made, *descale.unbind()


def _run_cpu(q, k, v):
    _look(q, k, v)
    made, descale = _empty(q, k, v)
    if not q.is_meta:  # which has no numbers to look at
        found = reference.quantize_qkv(q, k, v)
        for x, y in zip((*made, *descale.unbind()), found, strict=True):
            x.copy_(y)
    return *made, *descale.unbind()


# Results of an op may share no memory: each descale has its own.


def _apart(found):
    return *found[:3], *(x.clone() for x in found[3:])


def _cuda_op(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _apart(_run(q, k, v))


def _cpu_op(q, k, v):
    return _apart(_run_cpu(q, k, v))


def _fake(q, k, v):
    _look(q, k, v)
    made, descale = _empty(q, k, v)
    return *made, *(x.new_empty(x.shape) for x in descale)


_op = ops.torch_op(OP, cuda=_cuda_op, cpu=_cpu_op, fake=_fake)
