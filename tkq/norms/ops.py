"""tkq.rmsnorm and tkq.layernorm: what PyTorch sees of them, with their gradients."""
from typing import Optional

import torch
from torch import Tensor

from ..reference import norms
from ..runtime import arguments
from ..runtime.call import ops
from ..runtime.call.replay import CallCache
from . import autograd, checks, launch
from .launch import Call, recipe

__all__ = ["layernorm", "recipe", "rmsnorm"]

_call_cache, _call_cache_plain = CallCache(), CallCache()  # without gradients; those of no options
_OPTIONS = {kind: arguments.checker(kind, "eps", "prenorm", "weight_offset", "out_dtype", "residual_dtype")
            for kind in ("rmsnorm", "layernorm")}


def rmsnorm(x: Tensor, weight: Optional[Tensor] = None, *, bias: Optional[Tensor] = None, eps: float = 1e-6,
            residual: Optional[Tensor] = None, prenorm: bool = False, weight_offset: float = 0.0,
            out_dtype: Optional[torch.dtype] = None, residual_dtype: Optional[torch.dtype] = None):
    """h / sqrt(mean(h^2) + eps) * (weight + weight_offset) + bias over the last dimension, for h = x + residual (Zhang
    and Sennrich, 2019).

    Computed in float32 and rounded once. Differentiable once, in x, weight, bias and residual.

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
        out_dtype: of the result, x's where not given.
        residual_dtype: of the sum, with prenorm; the residual's where not given, or x's where there is none.

    Returns:
        A contiguous tensor of x's shape, in out_dtype. With prenorm the pair (result, h), h in residual_dtype: x itself
        where there is no residual and the types agree.

        The result is of h itself. Gradients with a residual are those at h as it is saved for them: in residual_dtype
        with prenorm, otherwise in the wider of both inputs' types.

    Raises:
        TypeError: x, weight, bias or residual is no dense tensor of bf16, fp16 or fp32; eps or weight_offset is no
            number; prenorm is no bool; out_dtype or residual_dtype is not bf16, fp16 or fp32.
        ValueError: eps is below 0; a number that is not finite in float32; shapes that do not match, several devices, a
            last dimension that is not contiguous, an option that would do nothing (weight_offset without a weight,
            residual_dtype without prenorm).
        NotImplementedError: N > 262144; N > 4096 where heads have weights of their own and a gradient is recorded.
        RuntimeError: a GPU other than Hopper.

    Example::

        x, residual = torch.randn(2, 64, 1024, device="cuda", dtype=torch.bfloat16)
        weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
        y = tkq.rmsnorm(x, weight, eps=1e-6)  # (64, 1024) bfloat16
        y, total = tkq.rmsnorm(x, weight, residual=residual, prenorm=True)  # (64, 1024) bfloat16; (64, 1024) bfloat16
    """
    if (residual is None and prenorm is False and out_dtype is None and residual_dtype is None
            and type(weight_offset) is float and weight_offset == 0.0):
        found = None if ops.traced() else _call_cache_plain.take(x, weight, bias, eps, "rmsnorm")
        if found is not None:
            return found
        eps = checks.EPS["rmsnorm"](eps)
        return _routed(_call_cache_plain, (x, weight, bias, eps, "rmsnorm"), "rmsnorm", x, weight, bias, eps)
    return _norm("rmsnorm", x, weight, bias, eps, residual, prenorm, weight_offset, out_dtype, residual_dtype)


def layernorm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, *, eps: float = 1e-5,
              residual: Optional[Tensor] = None, prenorm: bool = False, weight_offset: float = 0.0,
              out_dtype: Optional[torch.dtype] = None, residual_dtype: Optional[torch.dtype] = None):
    """(h - mean) / sqrt(var + eps) * (weight + weight_offset) + bias over the last dimension, for h = x + residual (Ba
    et al., 2016).

    The variance is the mean of (h - mean)^2, from centred values. Computed in float32 and rounded once. Differentiable
    once, in x, weight, bias and residual.

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
        out_dtype: of the result, x's where not given.
        residual_dtype: of the sum, with prenorm; the residual's where not given, or x's where there is none.

    Returns:
        A contiguous tensor of x's shape, in out_dtype. With prenorm the pair (result, h), h in residual_dtype: x itself
        where there is no residual and the types agree.

        The result is of h itself. Gradients with a residual are those at h as it is saved for them: in residual_dtype
        with prenorm, otherwise in the wider of both inputs' types.

    Raises:
        TypeError: x, weight, bias or residual is no dense tensor of bf16, fp16 or fp32; eps or weight_offset is no
            number; prenorm is no bool; out_dtype or residual_dtype is not bf16, fp16 or fp32.
        ValueError: eps is below 0; a number that is not finite in float32; shapes that do not match, several devices, a
            last dimension that is not contiguous, an option that would do nothing (weight_offset without a weight,
            residual_dtype without prenorm).
        NotImplementedError: N > 262144; N > 4096 where heads have weights of their own and a gradient is recorded.
        RuntimeError: a GPU other than Hopper.

    Example::

        x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
        weight, bias = torch.ones(1024, device="cuda"), torch.zeros(1024, device="cuda")
        y = tkq.layernorm(x, weight, bias, eps=1e-5)  # (64, 1024) bfloat16
    """
    if (residual is None and prenorm is False and out_dtype is None and residual_dtype is None
            and type(weight_offset) is float and weight_offset == 0.0):
        found = None if ops.traced() else _call_cache_plain.take(x, weight, bias, eps, "layernorm")
        if found is not None:
            return found
        eps = checks.EPS["layernorm"](eps)
        return _routed(_call_cache_plain, (x, weight, bias, eps, "layernorm"), "layernorm", x, weight, bias, eps)
    return _norm("layernorm", x, weight, bias, eps, residual, prenorm, weight_offset, out_dtype, residual_dtype)


def _norm(kind, x, weight, bias, eps, residual, prenorm, offset, out_dtype, residual_dtype):
    if not ops.traced():
        found = _call_cache.take(x, weight, bias, residual, kind, eps, prenorm, offset, out_dtype, residual_dtype)
        if found is not None:
            return found
    eps, prenorm, offset, out_dtype, residual_dtype = _OPTIONS[kind](eps, prenorm, offset, out_dtype, residual_dtype)
    if offset != 0.0 or residual_dtype is not None:
        checks.options(kind, weight, offset, prenorm, residual_dtype)
    given = x, weight, bias, residual, kind, eps, prenorm, offset, out_dtype, residual_dtype
    return _routed(_call_cache, given, kind, x, weight, bias, eps, residual, prenorm, offset, out_dtype, residual_dtype)


def _routed(calls, given, kind, x, weight, bias, eps, residual=None, prenorm=False, offset=0.0, out_dtype=None,
            residual_dtype=None):
    """A call whose options have been validated. calls, given: where it is remembered, and as what."""
    mode = ops.route(x, weight, bias, residual)
    if mode == "op":
        return _traced(kind, x, weight, bias, eps, residual, prenorm, offset, out_dtype, residual_dtype)
    total = launch.total_dtype(x, residual, residual_dtype) if prenorm else None
    if mode == "record":
        if residual is None and not prenorm:
            return _Recorded.apply(x, weight, bias, (kind, eps, offset, out_dtype, None, True, None))
        call = kind, eps, offset, out_dtype, _saved_dtype(x, residual, total), True, None
        found = _RecordedWithSum.apply(x, weight, bias, residual, call)
        return found if prenorm else found[0]
    call = kind, eps, offset, out_dtype, total, False, None
    made = (launch.norm if x.is_cuda else _on_cpu)(call, x, weight, bias, residual)
    found = (made[0], x if total is None else made[1]) if prenorm else made[0]
    if x.is_cuda:
        launch.remember(calls, given, call, (x, weight, bias, residual), made, found)
    return found


def _saved_dtype(x, residual, total):
    """The type in which the sum is written where a gradient is recorded, which needs it: given, or wide enough."""
    if total is not None or residual is None:
        return total
    try:
        return torch.promote_types(x.dtype, residual.dtype)
    except RuntimeError:  # of float8, which no norm takes: `checks.norm` says so
        return None


def _on_cpu(call: tuple, x, weight, bias, residual, validate=None) -> launch.Results:
    """By the reference. call: a Call, or the plain tuple of its fields, which is made in a third of the time."""
    call = Call(*call)
    checks.norm(call.kind, x, weight, bias, residual)
    if validate is not None:
        validate(call.eps)
    if call.stats:
        checks.gradient_of_heads(call.kind, x, weight)
    y, h, rstd, mean = norms.norm(call.kind, x, weight, bias, residual, eps=call.eps, weight_offset=call.offset)
    y, total = (None if dtype is None else t.contiguous().to(dtype, copy=True)
                for t, dtype in ((y, call.out or x.dtype), (h, call.total)))
    if not call.stats:
        return y, total, None, None, None
    if residual is not None and total is not None:  # the backward pass reads the sum as it is saved
        rstd, mean = norms.statistics(call.kind, total, call.eps)
    return y, total, rstd, mean, None


# ---- gradients: in plain eager mode ---------------------------------------------------------------------------


def _recorded(ctx, x, weight, bias, call):
    """y, of x alone."""
    y, _, rstd, mean, _ = (launch.replayed if x.is_cuda else _on_cpu)(call, x, weight, bias, None)
    autograd.remember_quickly(ctx, call, (x, weight, bias, None), None, (rstd, mean))
    return y


def _recorded_with_sum(ctx, x, weight, bias, residual, call):
    """(y, the sum), also where the sum is not asked for: it is saved in x's place, for which `ops.once` wants a
    result."""
    y, h, rstd, mean, _ = (launch.replayed if x.is_cuda else _on_cpu)(call, x, weight, bias, residual)
    autograd.remember_quickly(ctx, call, (x, weight, bias, residual), h, (rstd, mean))
    total = x if h is None else h
    ctx.set_materialize_grads(False)  # either result may be left unused
    if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
        ctx.mark_non_differentiable(total)
    return y, total


def _recorded_backward(ctx, dy, dtotal=None):
    """Of both. In `_recorded` the call stands where the residual does: it never needs a gradient."""
    needs = ctx.needs_input_grad
    return *autograd.gradients(ctx, needs[:4], dy, dtotal), *[None] * (len(needs) - 4)


_Recorded = ops.eager_function("Norm", forward=_recorded, backward=_recorded_backward, of="rmsnorm, layernorm")
_RecordedWithSum = ops.eager_function("NormWithSum", forward=_recorded_with_sum, backward=_recorded_backward,
                                      of="rmsnorm, layernorm")


# ---- the custom ops: traced, fake, functorch ------------------------------------------------------------------


def _traced(kind, x, weight, bias, eps, residual, prenorm, offset, out_dtype, residual_dtype):
    checks.norm(kind, x, weight, bias, residual)
    save = ops.recorded_op(kind, x=x, weight=weight, bias=bias, residual=residual)
    total = launch.total_dtype(x, residual, residual_dtype) if prenorm else None
    saved_as = _saved_dtype(x, residual, total) if save else total
    y, h, _, _ = _OPS[kind](x, weight, bias, eps, residual, offset, out_dtype, saved_as, save)
    return (y, x if total is None else h) if prenorm else y


def _op(kind):
    """`tkq::rmsnorm` or `tkq::layernorm`: y, the sum, rstd and mean; what is not asked for is empty."""
    def run(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, residual: Optional[Tensor],
            weight_offset: float, out_dtype: Optional[torch.dtype], total_dtype: Optional[torch.dtype],
            save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # a default would be compared with: see ops._schema
        call = kind, eps, weight_offset, out_dtype, total_dtype, save, None
        found = (launch.replayed if x.is_cuda else _on_cpu)(call, x, weight, bias, residual, checks.EPS[kind])
        return tuple(x.new_empty(0) if t is None else t for t in found[:4])

    def fake(x, weight, bias, eps, residual, weight_offset, out_dtype, total_dtype, save):
        checks.norm(kind, x, weight, bias, residual)
        rows = (x.numel() // x.shape[-1],)
        shapes = ((x.shape, out_dtype or x.dtype), (total_dtype and x.shape, total_dtype),
                  (save and rows, torch.float32), (save and kind == "layernorm" and rows, torch.float32))
        return tuple(x.new_empty(shape, dtype=dtype) if shape else x.new_empty(0) for shape, dtype in shapes)

    def setup(ctx, inputs, output):
        x, weight, bias, _, residual, offset, _, total, save = inputs
        if not save or (residual is not None and total is None):
            raise ValueError(f"tkq::{kind}: a gradient is recorded, which needs save=True, and with a residual the sum "
                             "(total_dtype)")
        _, h, rstd, mean = output
        autograd.remember(ctx, kind, offset, x, weight, bias, residual, h, rstd, mean)
        ctx.mark_non_differentiable(rstd, mean, *([h] if total is None else []))
        ctx.set_materialize_grads(False)

    def formula(ctx, dy, dtotal, *_):
        needs = ctx.needs_input_grad
        dx, dweight, dbias, dresidual = autograd.gradients(ctx, (*needs[:3], needs[4]), dy, dtotal)
        return dx, dweight, dbias, None, dresidual, None, None, None, None

    return ops.torch_op(kind, cuda=run, cpu=run, fake=fake, setup=setup, backward=formula)


_OPS = {kind: _op(kind) for kind in ("rmsnorm", "layernorm")}
