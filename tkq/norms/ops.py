"""tkq.rmsnorm and tkq.layernorm: from torch tensors to a launch."""
from typing import Optional

import torch
from torch import Tensor

from .. import reference, runtime
from ..runtime import arch, check, dtypes, ops
from .plan import plan
from .spec import MAX_N, WIDTH, NormSpec

_REFERENCE = {"rmsnorm": reference.rmsnorm, "layernorm": reference.layernorm}
_MAX_ROWS = 1 << 30  # of one launch: the kernel counts rows in 32 bits

# Launchers by what decides the kernel. On a hit the compiled function checks every shape, stride, address and device.
_launchers: dict = {}


def rmsnorm(x: Tensor, weight: Optional[Tensor] = None, *, bias: Optional[Tensor] = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight + bias, over the last dimension (Zhang and Sennrich, 2019).

    Computed in float32 and rounded once.

    Args:
        x: (..., N), bf16, fp16 or fp32, N from 1 to 262144, last dimension contiguous. Rows may be any distance apart:
            a view x[:, :N] is read in place. Leading dimensions that no single row stride describes are copied first.
        weight, bias: (N,), contiguous, bf16, fp16 or fp32, not necessarily x's type.
        eps: added to the mean square.

    Returns:
        A contiguous tensor of x's shape and type.

    Raises:
        TypeError: not a tensor, or a dtype that is not allowed.
        ValueError: shapes that do not match, several devices, a last dimension that is not contiguous.
        NotImplementedError: N > 262144, or a gradient is asked for.
        RuntimeError: a GPU other than Hopper.
    """
    return _norm("rmsnorm", x, weight, bias, eps)


def layernorm(x: Tensor, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None, *,
              eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last dimension (Ba et al., 2016).

    The variance is the mean of (x - mean)^2, from centred values. Computed in float32 and rounded once.

    Args:
        x: (..., N), bf16, fp16 or fp32, N from 1 to 262144, last dimension contiguous. Rows may be any distance apart:
            a view x[:, :N] is read in place. Leading dimensions that no single row stride describes are copied first.
        weight, bias: (N,), contiguous, bf16, fp16 or fp32, not necessarily x's type.
        eps: added to the variance.

    Returns:
        A contiguous tensor of x's shape and type.

    Raises:
        TypeError: not a tensor, or a dtype that is not allowed.
        ValueError: shapes that do not match, several devices, a last dimension that is not contiguous.
        NotImplementedError: N > 262144, or a gradient is asked for.
        RuntimeError: a GPU other than Hopper.
    """
    return _norm("layernorm", x, weight, bias, eps)


def _norm(kind, x, weight, bias, eps):
    if not ops.direct(x, weight, bias):
        check.refuse_gradient(kind, x=x, weight=weight, bias=bias)
        _check(kind, x, weight, bias)
        return _OPS[kind](x, weight, bias, eps)
    if x.is_cuda:
        return _launch(kind, x, weight, bias, eps)
    return _on_cpu(kind, x, weight, bias, eps)


def _launch(kind: str, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float,
            out: Optional[Tensor] = None) -> Tensor:
    """Run the kernel. out: a contiguous tensor like x to write to, for whoever owns the memory."""
    rows = x if x.dim() == 2 else _rows(kind, x)
    M = rows.shape[0]
    key = _key(kind, rows, weight, bias)
    run = _launchers.get(key)
    if run is None:
        run = _launchers[key] = _launcher(kind, rows, weight, bias)
    if out is None:
        out = torch.empty_like(x) if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to = out if rows is x else out.view(rows.shape)
    try:
        if 0 < M <= _MAX_ROWS:
            run(rows, weight, bias, to, eps)
        else:
            for part, out_part in zip(rows.split(_MAX_ROWS), to.split(_MAX_ROWS), strict=True) if M else ():
                run(part, weight, bias, out_part, eps)
    except Exception:
        _check(kind, x, weight, bias)  # says what is wrong in a user's words
        raise
    return out


def _rows(kind, x):
    """x as (M, N)."""
    _check_x(kind, x)
    return x.reshape(-1, x.shape[-1])


def _key(kind, x, weight, bias):
    """What decides the kernel, by the quickest ways torch has to say it. The rest the kernel checks itself."""
    return (kind, x.dtype, x.shape[1], x.stride(0) & 7, x.get_device(), x.data_ptr() & 15,
            weight is not None and (weight.dtype, weight.data_ptr() & 15),
            bias is not None and (bias.dtype, bias.data_ptr() & 15))


def _launcher(kind, x, weight, bias):
    _check(kind, x, weight, bias)
    arch.require_hopper(x.device)
    given = [None if t is None else dtypes.name_of(t.dtype) for t in (weight, bias)]
    spec = NormSpec(kind, x.shape[1], dtypes.name_of(x.dtype), *given, vector=_vector(x, weight, bias))
    return runtime.function(recipe(spec))


def recipe(spec: NormSpec, config=None):
    """The recipe of a spec, with its planned config or another one."""
    return runtime.Recipe("tkq.norms.build:build", (spec, config or plan(spec)))


def _vector(x, weight, bias) -> int:
    """Elements of one access: as many as 16 bytes, N, the row stride and every base address allow."""
    size, vector = x.element_size(), 16 // x.element_size()
    while x.shape[1] % vector or x.stride(0) % vector or x.data_ptr() % (vector * size) or not all(
            t is None or t.data_ptr() % min(16, vector * t.element_size()) == 0 for t in (weight, bias)):
        vector //= 2
    return vector


def _check(kind, x, weight, bias):
    """Raises what the public functions promise."""
    _check_x(kind, x)
    N = x.shape[-1]
    for name, t in (("weight", weight), ("bias", bias)):
        if t is None:
            continue
        check.dtype(name, t, tuple(WIDTH))
        check.shape(name, t, (N,))
        check.last_dim_contiguous(name, t)
    check.same_device(x=x, weight=weight, bias=bias)


def _check_x(kind, x):
    check.dtype("x", x, tuple(WIDTH))
    if x.dim() == 0 or x.shape[-1] < 1:
        raise ValueError(f"{kind}: x: got shape {tuple(x.shape)}, allowed are (..., N) with N of 1 and more")
    if x.shape[-1] > MAX_N:
        raise NotImplementedError(f"{kind}: x: got N = {x.shape[-1]} columns, allowed are 1 to {MAX_N}")
    check.last_dim_contiguous("x", x)


def _on_cpu(kind, x, weight, bias, eps):
    _check(kind, x, weight, bias)
    return _REFERENCE[kind](x, weight, bias, eps).contiguous()


def _fake(kind, x, weight, bias):
    _check(kind, x, weight, bias)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _op(kind):
    def cuda(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float) -> Tensor:
        return _launch(kind, x, weight, bias, eps)

    def cpu(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float) -> Tensor:
        return _on_cpu(kind, x, weight, bias, eps)

    def fake(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float) -> Tensor:
        return _fake(kind, x, weight, bias)

    return ops.torch_op(kind, cuda=cuda, cpu=cpu, fake=fake)


_OPS = {kind: _op(kind) for kind in _REFERENCE}
