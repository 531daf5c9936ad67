"""The norms' gradients as autograd asks for them: what is saved, and which kernel computes them."""
from typing import Optional

import torch
from torch import Tensor

from ..reference import norms
from ..runtime.call import ops
from .backward.ops import norm_backward
from .backward.per_head_ops import heads_backward


def remember(ctx, kind, offset, x, weight, bias, residual, total, rstd, mean) -> None:
    """Save what `gradients` needs: what was normalised (x or the sum), weight, rstd and mean; and types, None where
    there is no such input."""
    ctx.save_for_backward(x if residual is None else total, weight, rstd, mean)
    ctx.facts = (kind, offset, x.dtype, bias is not None and bias.dtype, residual is not None and residual.dtype)


def remember_quickly(ctx, call, inputs, total, statistics) -> None:
    """The same in plain eager mode. call, inputs: as of `launch.norm`. statistics: rstd and mean, which hooks for saved
    tensors do not see: they are small, and each tensor that autograd saves costs 0.3 us."""
    x, weight, bias, residual = inputs
    ctx.save_for_backward(x if residual is None else total, weight)
    ctx.statistics = statistics
    ctx.facts = (call[0], call[2], x.dtype, bias is not None and bias.dtype, residual is not None and residual.dtype)


def gradients(ctx, needs, dy, dtotal):
    """(dx, dweight, dbias, dresidual), None for those that are not needed. dtotal: of the sum as a result."""
    kind, offset, x_dtype, bias_dtype, residual_dtype = ctx.facts
    need_x, need_weight, need_bias, need_residual = needs
    if dy is None and dtotal is None:
        return (None,) * 4
    if dy is None:  # only the sum was used
        return (dtotal.to(x_dtype) if need_x else None, None, None,
                dtotal.to(residual_dtype) if need_residual else None)
    # x and residual have one gradient; it is written a second time only for a second type
    other = residual_dtype if need_x and need_residual and residual_dtype != x_dtype else None
    h, weight, *statistics = ctx.saved_tensors
    rstd, mean = statistics or ctx.statistics
    mean = mean if kind == "layernorm" else None
    call = (dtotal, offset, need_x or need_residual, need_weight, need_bias, x_dtype if need_x else residual_dtype,
            other, bias_dtype if need_bias else None)
    if ops.route(dy, h, weight, dtotal) == "direct":
        dx, dweight, dbias, dresidual = _norm_backward(kind, dy, h, weight, rstd, mean, *call)
    else:  # traced
        found = _op(dy, h, weight, rstd, mean, kind, *call)
        dx, dweight, dbias, dresidual = (t if wanted else None for t, wanted in zip(found, (*call[2:5], other)))
    if other is None:
        dresidual = dx
    return dx if need_x else None, dweight, dbias, dresidual if need_residual else None


def _norm_backward(kind, dy, x, weight, rstd, mean, dtotal, offset, need_dx, need_dweight, need_dbias, dx_dtype,
                   dresidual_dtype, dbias_dtype):
    """`reference.norms.norm_backward`, by a kernel where the tensors are on a GPU."""
    options = dict(weight_offset=offset, needs=(need_dx, need_dweight, need_dbias), dx_dtype=dx_dtype,
                   dresidual_dtype=dresidual_dtype, dbias_dtype=dbias_dtype)
    if not dy.is_cuda:
        return norms.norm_backward(kind, dy, x, weight, rstd, mean, dresidual_out=dtotal, **options)
    row_dims = 1 if weight is None else weight.dim()
    dy, rows, dtotal = (_rows(t, row_dims) for t in (dy, x, dtotal))
    if row_dims == 2:
        dx, dweight, dbias, dresidual = heads_backward(kind, dy, rows, weight, rstd, mean,
                                                       dresidual_out=dtotal, **options)
    else:
        dx, dweight, dbias, dresidual = norm_backward(kind, dy, rows, weight, rstd, mean, dresidual_out=dtotal,
                                                      **options)
    if rows is x:
        return dx, dweight, dbias, dresidual
    return (None if dx is None else dx.view_as(x), dweight, dbias,
            None if dresidual is None else dresidual.view_as(x))


def _rows(t, row_dims):
    """As (M, N), or (R, H, N) with row_dims = 2; the last dimension contiguous. Copies only what cannot be read so."""
    if t is None:
        return None
    if t.stride(-1) != 1 and t.shape[-1] > 1:  # a sum's gradient, for example: one element, seen everywhere
        t = t.contiguous()
    return t if t.dim() == row_dims + 1 else t.reshape(-1, *t.shape[-row_dims:])


# ---- for tracing ------------------------------------------------------------------------------------------------


def _backward(dy: Tensor, x: Tensor, weight: Optional[Tensor], rstd: Tensor, mean: Optional[Tensor], kind: str,
              dtotal: Optional[Tensor], offset: float, need_dx: bool, need_dweight: bool, need_dbias: bool,
              dx_dtype: torch.dtype, dresidual_dtype: Optional[torch.dtype],
              dbias_dtype: Optional[torch.dtype]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dweight, dbias and dresidual; empty what is not wanted. A tensor comes first: DTensor looks for its mesh
    there."""
    found = _norm_backward(kind, dy, x, weight, rstd, mean, dtotal, offset, need_dx, need_dweight, need_dbias, dx_dtype,
                           dresidual_dtype, dbias_dtype)
    return tuple(x.new_empty(0) if t is None else t for t in found)


def _fake(dy, x, weight, rstd, mean, kind, dtotal, offset, need_dx, need_dweight, need_dbias, dx_dtype, dresidual_dtype,
          dbias_dtype):
    columns = x.shape[-1:] if weight is None else weight.shape
    made = ((need_dx, x.shape, dx_dtype), (need_dweight, columns, None if weight is None else weight.dtype),
            (need_dbias, columns, dbias_dtype), (dresidual_dtype is not None, x.shape, dresidual_dtype))
    return tuple(x.new_empty(shape, dtype=dtype) if wanted else x.new_empty(0) for wanted, shape, dtype in made)


_op = ops.torch_op("norm_backward", cuda=_backward, cpu=_backward, fake=_fake)
