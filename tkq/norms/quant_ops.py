"""tkq.rmsnorm_quant and tkq.layernorm_quant: what PyTorch sees of the norms that write float8."""
from typing import Optional

import torch
from torch import Tensor

from ..reference import norms
from ..runtime import arguments
from ..runtime.call import check, ops
from ..runtime.call.replay import CallCache
from . import checks, launch
from .launch import Call
from .spec import GROUP

_E4M3 = torch.float8_e4m3fn
_call_cache = CallCache()
_OPTIONS = {kind: arguments.checker(f"{kind}_quant", "eps", "prenorm", "weight_offset", "residual_dtype", "granularity")
            for kind in ("rmsnorm", "layernorm")}


def rmsnorm_quant(x: Tensor, weight: Optional[Tensor] = None, *, bias: Optional[Tensor] = None, eps: float = 1e-6,
                  residual: Optional[Tensor] = None, prenorm: bool = False, weight_offset: float = 0.0,
                  residual_dtype: Optional[torch.dtype] = None, granularity: str = "row"):
    """`tkq.rmsnorm`, its result y quantised in the same pass: y ~ q * scale.

    Args:
        x: (..., N), bf16, fp16 or fp32, N from 1 to 262144, last dimension contiguous. Other dimensions may have any
            strides that one or two row strides describe: views x[:, :N], and slices of a packed (B, S, 3, H, D), are
            read in place. What needs more is copied first.
        weight, bias: (N,), contiguous, bf16, fp16 or fp32, not necessarily x's type. Or both (H, N), for x (..., H, N):
            each head has its own.
        eps: added to the mean square, 0 or more.
        residual: like x, of any of the three types; added to x in float32.
        prenorm: return the sum h too, the residual of the next layer.
        weight_offset: added to the weight in float32: 1.0 for models (Gemma) that store weight - 1.
        residual_dtype: of the sum, with prenorm; the residual's where not given, or x's where there is none.
        granularity: "row", one scale for each row; or "1x128", one for each 128 columns of a row. Or the members
            RowWise and BlockWise1x128 of torch.nn.functional.ScalingType.

    Returns:
        (q, scale), with prenorm (q, scale, h). q: contiguous, float8_e4m3fn, of x's shape. scale: float32, (M, 1), or
        (M, ceil(N / 128)) for "1x128", M being all leading dimensions together. Multiply by it to get y back. These
        lie as the float8 GEMM reads them, a column of M one after the other: strides (1, M rounded up to 4).

        scale = max(amax / 448, 2^-126) for amax, the largest |y|, of which 448 is the image: e4m3's largest number.
        So zeros have the scale 2^-126 and q = 0. Where a y of the row (or 128 columns) is NaN, its scale and all of
        its q are. Where one is infinite, the scale is, too: q is NaN there, 0 elsewhere, and q * scale NaN throughout.

    Raises:
        TypeError: x, weight, bias or residual is no dense tensor of bf16, fp16 or fp32; eps or weight_offset is no
            number; prenorm is no bool; residual_dtype is not bf16, fp16 or fp32; granularity is no word or
            ScalingType.
        ValueError: eps is below 0; granularity is another word; a number that is not finite in float32; shapes that do
            not match, several devices, a last dimension that is not contiguous, an option that would do nothing
            (weight_offset without a weight, residual_dtype without prenorm).
        NotImplementedError: N > 262144; a gradient is asked for.
        RuntimeError: a GPU other than Hopper.

    Example::

        x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
        weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
        y, scale = tkq.rmsnorm_quant(x, weight)  # (64, 1024) float8_e4m3fn; (64, 1) float32
        w, scale_w = tkq.quantize_fp8(torch.randn(256, 1024, device="cuda"), "row")
        z = tkq.fp8_gemm(y, w.t(), scale, scale_w.t())  # (64, 256) bfloat16
    """
    return _quant("rmsnorm", x, weight, bias, eps, residual, prenorm, weight_offset, residual_dtype, granularity)


def layernorm_quant(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, *, eps: float = 1e-5,
                    residual: Optional[Tensor] = None, prenorm: bool = False, weight_offset: float = 0.0,
                    residual_dtype: Optional[torch.dtype] = None, granularity: str = "row"):
    """`tkq.layernorm`, its result y quantised in the same pass: y ~ q * scale.

    Args:
        x: (..., N), bf16, fp16 or fp32, N from 1 to 262144, last dimension contiguous. Other dimensions may have any
            strides that one or two row strides describe: views x[:, :N], and slices of a packed (B, S, 3, H, D), are
            read in place. What needs more is copied first.
        weight, bias: (N,), contiguous, bf16, fp16 or fp32, not necessarily x's type. Or both (H, N), for x (..., H, N):
            each head has its own.
        eps: added to the variance, 0 or more.
        residual: like x, of any of the three types; added to x in float32.
        prenorm: return the sum h too, the residual of the next layer.
        weight_offset: added to the weight in float32: 1.0 for models (Gemma) that store weight - 1.
        residual_dtype: of the sum, with prenorm; the residual's where not given, or x's where there is none.
        granularity: "row", one scale for each row; or "1x128", one for each 128 columns of a row. Or the members
            RowWise and BlockWise1x128 of torch.nn.functional.ScalingType.

    Returns:
        (q, scale), with prenorm (q, scale, h). q: contiguous, float8_e4m3fn, of x's shape. scale: float32, (M, 1), or
        (M, ceil(N / 128)) for "1x128", M being all leading dimensions together. Multiply by it to get y back. These
        lie as the float8 GEMM reads them, a column of M one after the other: strides (1, M rounded up to 4).

        scale = max(amax / 448, 2^-126) for amax, the largest |y| of its row (or 128 columns); rows of zeros, NaN and
        infinity are as `rmsnorm_quant` has them.

    Raises:
        TypeError: x, weight, bias or residual is no dense tensor of bf16, fp16 or fp32; eps or weight_offset is no
            number; prenorm is no bool; residual_dtype is not bf16, fp16 or fp32; granularity is no word or
            ScalingType.
        ValueError: eps is below 0; granularity is another word; a number that is not finite in float32; shapes that do
            not match, several devices, a last dimension that is not contiguous, an option that would do nothing
            (weight_offset without a weight, residual_dtype without prenorm).
        NotImplementedError: N > 262144; a gradient is asked for.
        RuntimeError: a GPU other than Hopper.

    Example::

        x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
        weight, bias = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
        y, scale = tkq.layernorm_quant(x, weight, bias)  # (64, 1024) float8_e4m3fn; (64, 1) float32
    """
    return _quant("layernorm", x, weight, bias, eps, residual, prenorm, weight_offset, residual_dtype, granularity)


def _quant(kind, x, weight, bias, eps, residual, prenorm, offset, residual_dtype, granularity):
    if not ops.traced():
        found = _call_cache.take(x, weight, bias, residual, kind, eps, prenorm, offset, residual_dtype, granularity)
        if found is not None:
            return found
    eps, prenorm, offset, residual_dtype, granularity = _OPTIONS[kind](eps, prenorm, offset, residual_dtype,
                                                                       granularity)
    if offset != 0.0 or residual_dtype is not None:
        checks.options(f"{kind}_quant", weight, offset, prenorm, residual_dtype)
    mode = ops.route(x, weight, bias, residual)
    if mode != "direct":
        check.refuse_gradient(f"{kind}_quant", x=x, weight=weight, bias=bias, residual=residual)
        checks.norm(f"{kind}_quant", x, weight, bias, residual)
    total = launch.total_dtype(x, residual, residual_dtype) if prenorm else None
    if mode != "direct":
        q, scale, h = _OPS[kind](x, weight, bias, eps, residual, offset, total, granularity)
        return (q, scale, x if total is None else h) if prenorm else (q, scale)
    call = kind, eps, offset, _E4M3, total, False, granularity
    made = (launch.norm if x.is_cuda else _on_cpu)(call, x, weight, bias, residual)
    q, h, _, _, scale = made
    found = (q, scale, x if total is None else h) if prenorm else (q, scale)
    if x.is_cuda:
        given = x, weight, bias, residual, kind, eps, prenorm, offset, residual_dtype, granularity
        launch.remember(_call_cache, given, call, (x, weight, bias, residual), made, found)
    return found


def _on_cpu(call: tuple, x, weight, bias, residual, validate=None) -> launch.Results:
    call = Call(*call)
    checks.norm(call.op, x, weight, bias, residual)
    if validate is not None:
        validate(call.eps)
    y, h, _, _ = norms.norm(call.kind, x, weight, bias, residual, eps=call.eps, weight_offset=call.offset)
    q, found = norms.quantise(y.reshape(-1, x.shape[-1]), call.scale)
    scale = _scales(call.scale, found.shape[0], x).copy_(found)
    return q.view(x.shape), None if call.total is None else h.contiguous().to(call.total, copy=True), None, None, scale


def _scales(granularity, M, x):
    """Room for the scales of M rows like x's, as `launch` makes it."""
    shape, stride = ((M, 1), (1, 1)) if granularity == "row" else ((M, -(-x.shape[-1] // GROUP)), (1, -(-M // 4) * 4))
    return torch.empty_strided(shape, stride, dtype=torch.float32, device=x.device)


def _op(kind):
    """`tkq::rmsnorm_quant` or `tkq::layernorm_quant`: q, scale and the sum, which is empty where not asked for."""
    validate = checks.EPS[f"{kind}_quant"]
    granularity_of = arguments.checker(f"{kind}_quant", "granularity")  # programs of before may have old names

    def run(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, residual: Optional[Tensor],
            weight_offset: float, total_dtype: Optional[torch.dtype],
            granularity: str) -> tuple[Tensor, Tensor, Tensor]:
        call = kind, eps, weight_offset, _E4M3, total_dtype, False, granularity_of(granularity)
        q, h, _, _, scale = (launch.replayed if x.is_cuda else _on_cpu)(call, x, weight, bias, residual, validate)
        return q, scale, x.new_empty(0) if h is None else h

    def fake(x, weight, bias, eps, residual, weight_offset, total_dtype, granularity):
        checks.norm(f"{kind}_quant", x, weight, bias, residual)
        return (x.new_empty(x.shape, dtype=_E4M3),
                _scales(granularity_of(granularity), x.numel() // x.shape[-1], x),
                x.new_empty(0) if total_dtype is None else x.new_empty(x.shape, dtype=total_dtype))

    return ops.torch_op(f"{kind}_quant", cuda=run, cpu=run, fake=fake)


_OPS = {kind: _op(kind) for kind in ("rmsnorm", "layernorm")}
