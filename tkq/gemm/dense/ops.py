"""tkq.gemm: what PyTorch sees of the matrix product."""
from collections.abc import Callable
from typing import Optional, Union

import torch
from torch import Tensor

from tkq import reference
from tkq.gemm.dense import backward
from tkq.gemm.dense.launch import (
    Extra,
    call_cache,
    check_apart,
    check_call,
    check_out,
    extra_of,
    inner_fits,
    quick,
    quick_into,
    remember_into,
    run,
    shape_of,
    wave_sync_call_cache,
)
from tkq.gemm.dense.spec import OUT_DTYPES
from tkq.gemm.epilogue.spec import name_of
from tkq.runtime import arguments
from tkq.runtime.call import alloc, autocast, check, ops

__all__ = ["gemm", "run"]
_options = arguments.checker("gemm", "alpha", "beta", "out_dtype")


def gemm(a: Tensor, b: Tensor, *, bias: Optional[Tensor] = None, activation: Union[str, Callable, None] = None,
         c: Optional[Tensor] = None, alpha: float = 1.0, beta: float = 0.0, out: Optional[Tensor] = None,
         out_dtype: Optional[torch.dtype] = None) -> Tensor:
    """activation(alpha * a @ b + beta * c + bias) with float32 accumulation, in one kernel.

    The sum is rounded once. But for "relu", the activation of a 16-bit result without c is computed while the next
    tile's products run, of the sum in the result's type: rounded before and after, as by two calls.

    Differentiable once, in a, b, bias and c. Where autograd records a call with an activation, the sum is saved and the
    activation is a pass of its own; later backward products read a and b.

    Args:
        a: (M, K), bfloat16 or float16; or (B, M, K), a product for each of B.
        b: (K, N) or (B, K, N), as a. M and N may be anything, also 0; K is a multiple of 8 (0 gives zeros). Either
            may be row- or column-major, so ``x.t()`` costs nothing; ``expand`` shares one matrix among a batch. The
            kernels read operands whose base and other strides are multiples of 16 bytes. On a GPU another one is first
            copied, at the speed of memory, into memory of its size from torch's allocator, which has it back when the
            call returns; or read element by element, in small products whose K is at most 64. Results of any pitch are
            written as they lie.
        bias: (N,), bfloat16, float16 or float32: a value for each column of b.
        activation: "relu", "silu", "gelu" (by erf), "gelu_tanh"; or gated, act(gate) * up, N / 2 columns: "swiglu"
            (silu), "geglu", "geglu_tanh", of the columns (gate | up), and "swiglu_interleaved" and so on of (gate 0,
            up 0, gate 1, ..), which is fast where b is column-major. On a GPU gelu of -inf is 0 in bfloat16; in other
            types it is NaN, as PyTorch's. Or a function of a module of yours, of one float32 number of the CuTe DSL, or
            of (number, row, column): see examples/write_an_epilogue.py.
        c: (M, N) or (B, M, N), of the result's dtype, rows contiguous: what is added, times beta. Not with a gated
            activation.
        alpha, beta: finite numbers. beta is not 0 where there is a c.
        out: where to write: of the result's shape, rows contiguous, sharing no memory with the inputs; it may be c.
            Not where a gradient is asked for.
        out_dtype: bfloat16, float16 or float32; out's or a's where not given.

    Returns:
        (M, N) or (B, M, N), gated (.., N / 2); contiguous, or out.

    Raises:
        TypeError: a or b is no dense tensor of bf16 or fp16; bias, c or out is no dense tensor of bf16, fp16 or fp32;
            activation is no word or function; alpha or beta is no number; out_dtype is not bf16, fp16 or fp32; dtypes
            that do not go together.
        ValueError: a number that is not finite in float32; sizes that do not go together, K not a multiple of 8, two
            devices, an operand that is contiguous in neither dimension, c without beta or beta without c, an activation
            that is not known, out as above.
        NotImplementedError: c with a gated activation; a gradient of a function of your own; forward-mode gradients.
        RuntimeError: a GPU other than Hopper; out with a gradient.

    Under torch.autocast a and b are cast, and c where neither out nor out_dtype says what type it has.

    CPU tensors take ``tkq.reference.gemm``.

    Example::

        x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)  # as torch.nn.Linear keeps it: w.t() is no copy
        bias = torch.zeros(512, device="cuda", dtype=torch.bfloat16)
        y = tkq.gemm(x, w.t(), bias=bias, activation="silu")  # (64, 512) bfloat16
        z = tkq.gemm(x, w.t(), out_dtype=torch.float32)  # (64, 512) float32
    """
    name = "" if activation is None else name_of(activation)
    traced = ops.traced()
    if traced or autocast.on():
        a, b, c = autocast.lowered(a, b, c) if out is out_dtype is None else (*autocast.lowered(a, b), c)
    if out is None and not traced:
        found = call_cache.take(a, b, bias, name, c, alpha, beta, out_dtype)
        if found is None:
            found = wave_sync_call_cache.take(a, b, bias, name, c, alpha, beta, out_dtype)
        if found is not None:
            return found
    alpha, beta, out_dtype = _options(alpha, beta, out_dtype)
    mode = ops.route(a, b, bias, c, out)
    if out is not None:
        into = _launch_into if mode == "direct" and out.is_cuda else _into
        return into(out, a, b, out_dtype, Extra(bias, name, c, alpha, beta), mode)
    if mode == "direct":
        return (_launch if a.is_cuda else _on_cpu)(a, b, bias, name, c, alpha, beta, out_dtype, False)
    if mode == "record" and not name:
        return _Function.apply(a, b, bias, c, (alpha, beta, out_dtype))
    check_call(a, b, out_dtype, Extra(bias, name, c, alpha, beta))
    check.refuse_tangent("gemm", a=a, b=b, bias=bias, c=c)
    if name and ops.may_record(a, b, bias, c):
        return backward.activate(gemm(a, b, bias=bias, c=c, alpha=alpha, beta=beta, out_dtype=out_dtype), name)
    return _op(a, b, bias, name, c, alpha, beta, out_dtype)


def _needs_gradient(*tensors) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _cuda(a: Tensor, b: Tensor, bias: Optional[Tensor], activation: str, c: Optional[Tensor], alpha: float, beta: float,
          out_dtype: Optional[torch.dtype]) -> Tensor:
    return _replayed_or_launched(a, b, bias, activation, c, alpha, beta, out_dtype, True)


def _replayed_or_launched(*given):
    """given: as of ``_launch``."""
    found = call_cache.take(*given[:-1])
    if found is None:
        found = wave_sync_call_cache.take(*given[:-1])
    return _launch(*given) if found is None else found


def _launch(a, b, bias, activation, c, alpha, beta, out_dtype, any_k):
    """any_k: as of ``check_call``; for a call of ours, not a user's."""
    try:
        out, key = quick(a, b, bias, activation, c, alpha, beta, out_dtype)
        if out is None:
            extra = extra_of(bias, activation, c, alpha, beta)
            out = alloc.contiguous(a.get_device(), shape_of(a, b, activation), out_dtype or a.dtype)
            out = _product(a, b, out, extra, any_k, key)
        return out
    except Exception:
        # The compiled function checks every dtype, shape, stride, address and device before it launches; the words for
        # a user are found only when something is wrong.
        check_call(a, b, out_dtype, Extra(bias, activation, c, alpha, beta), any_k=any_k)
        raise


def _product(a, b, out, extra, any_k, key=None):
    k = a.shape[-1]
    if k % 8 or not k or not out.numel() or (extra.c is None) != (extra.beta == 0.0):
        # what the compiled function does not know, or where nothing is launched
        check_call(a, b, out.dtype, extra, any_k=any_k)
        if not out.numel():
            return out
        if not k:
            if ":" not in extra.activation:
                return out.copy_(_reference(a, b, extra, out.dtype))
            a, b = _zeros(a, b)
        key = None  # of a K that a user's call may not have
    if k % 8 and not inner_fits(a, b):
        return _of_any_k(a, b, out, extra)
    run(a, b, out, extra=extra, key=key)
    return out


def _of_any_k(a, b, out, extra):
    """Of a K that is no multiple of 8 and contiguous in an operand: in a gradient it is a layer's number of outputs."""
    if a.shape[-1] < 8:  # what is contiguous is not plain to see
        a, b = backward.padded(a, b)
    run(a, b, out, extra=extra, loose=a.shape[-1] % 8 > 0)
    return out


def _zeros(a, b):
    """Operands whose product is that of a (.., M, 0) and b (.., 0, N): what a function of one's own runs on."""
    return a.new_zeros(*a.shape[:-1], 8), b.new_zeros(*b.shape[:-2], 8, b.shape[-1])


def _launch_into(out, a, b, out_dtype, extra, mode):
    """In plain eager mode on a GPU: what has been checked before is not checked again, but for where out lies."""
    try:
        key = quick_into(out, a, b, out_dtype, extra)
        if key is None:
            torch.autograd.graph.increment_version(out)  # a backward that saved it raises
            return out
    except Exception:  # what is wrong is found below, with words for it
        key = None
    return _into(out, a, b, out_dtype, extra, mode, key)


def _into(out, a, b, out_dtype, extra, mode, key=None):
    check.dtype("out", out, OUT_DTYPES)
    check_call(a, b, out.dtype if out_dtype is None else out_dtype, extra)
    check_out(out, a, b, out_dtype, extra)
    if not ops.traced():
        check.refuse_inference("gemm", out=out)
    if _needs_gradient(a, b, extra.bias, extra.c, out):
        raise RuntimeError("gemm: out is given and an argument requires a gradient: out has no gradients; call it "
                           "under torch.no_grad(), or without out")
    if not ops.traced():  # which has no addresses
        check_apart(out, a, b, extra)
    if mode == "direct":
        if out.is_cuda and a.shape[-1] and out.numel():
            launched = run(a, b, out, extra=extra)
            if key is not None:
                remember_into(key, launched, out, a, b, extra)
            torch.autograd.graph.increment_version(out)
            return out
        if out.is_cuda and ":" not in extra.activation:
            return out.copy_(_reference(a, b, extra, out.dtype))
    bias, name, c, alpha, beta = extra
    made = gemm(a, b, bias=bias, activation=name or None, c=c, alpha=alpha, beta=beta, out_dtype=out.dtype)
    return out.copy_(made)


def _cpu(a: Tensor, b: Tensor, bias: Optional[Tensor], activation: str, c: Optional[Tensor], alpha: float, beta: float,
         out_dtype: Optional[torch.dtype]) -> Tensor:
    return _on_cpu(a, b, bias, activation, c, alpha, beta, out_dtype, True)


def _on_cpu(a, b, bias, activation, c, alpha, beta, out_dtype, any_k):
    extra = Extra(bias, activation, c, alpha, beta)
    check_call(a, b, out_dtype, extra, any_k=any_k)
    return _reference(a, b, extra, out_dtype)


def _reference(a, b, extra, out_dtype):
    bias, activation, c, alpha, beta = extra
    return reference.gemm(a, b, out_dtype, bias=bias, activation=activation, c=c, alpha=alpha, beta=beta)


def _fake(a: Tensor, b: Tensor, bias: Optional[Tensor], activation: str, c: Optional[Tensor], alpha: float, beta: float,
          out_dtype: Optional[torch.dtype]) -> Tensor:
    return a.new_empty(shape_of(a, b, activation), dtype=out_dtype or a.dtype)


def _setup(ctx, inputs, output):
    a, b, bias, activation, _, alpha, beta, _ = inputs
    if activation:  # reached only through torch.ops: the function above takes another route
        raise NotImplementedError(f"gemm: activation {activation!r} has no gradient in the op; call tkq.gemm")
    _remember(ctx, a, b, bias, alpha, beta)


def _remember(ctx, a, b, bias, alpha, beta):
    ctx.save_for_backward(a, b)
    ctx.facts = None if bias is None else bias.dtype, alpha, beta


def _backward(ctx, dy):
    """Gradients of (a, b, bias, activation, c, alpha, beta, out_dtype), of those that are needed."""
    needs_a, needs_b, needs_bias, _, needs_c, *_ = ctx.needs_input_grad
    da, db, dbias, dc = _gradients(ctx, dy, (needs_a, needs_b, needs_bias, needs_c))
    return da, db, dbias, None, dc, None, None, None


def _gradients(ctx, dy, needs):
    (a, b), (bias_dtype, alpha, beta) = ctx.saved_tensors, ctx.facts
    needs_a, needs_b, needs_bias, needs_c = needs
    da, db = backward.of_operands(multiply, dy, a, b, alpha, (needs_a, needs_b))
    dbias = dy.sum(tuple(range(dy.dim() - 1)), dtype=torch.float32).to(bias_dtype) if needs_bias else None
    dc = (dy if beta == 1.0 else dy * beta) if needs_c else None
    return da, db, dbias, dc


def multiply(x, y, alpha):
    """alpha * x @ y for any inner size, which of a weight's gradient is the number of rows."""
    check.refuse_tangent("gemm", a=x, b=y)
    if ops.direct(x, y):  # nothing is recorded in a backward
        given = x, y, None, "", None, alpha, 0.0, None
        return _cuda(*given) if x.is_cuda else _on_cpu(*given, True)
    return _op(x, y, None, "", None, alpha, 0.0, None)


_op = ops.torch_op("gemm", cuda=_cuda, cpu=_cpu, fake=_fake, setup=_setup, backward=_backward)


# In plain eager mode, without an activation: inputs are a, b, bias, c and the numbers.


def _recorded(ctx, a, b, bias, c, numbers):
    alpha, beta, out_dtype = numbers
    _remember(ctx, a, b, bias, alpha, beta)
    return (_replayed_or_launched if a.is_cuda else _on_cpu)(a, b, bias, "", c, alpha, beta, out_dtype, False)


def _recorded_backward(ctx, dy):
    return *_gradients(ctx, dy, ctx.needs_input_grad[:4]), None


_Function = ops.eager_function("Gemm", forward=_recorded, backward=_recorded_backward, of="gemm")
