"""The norms' gradients as autograd asks for them: what is kept, and which kernel computes them."""
from .. import reference_norms


def remember(ctx, kind, offset, x, weight, bias, residual, total, rstd, mean) -> None:
    """Keep what `gradients` needs: what was normalised (x or the sum), weight, rstd and mean; and types, None where
    there is no such input."""
    ctx.save_for_backward(x if residual is None else total, weight, rstd, mean)
    ctx.facts = (kind, offset, x.dtype, bias is not None and bias.dtype, residual is not None and residual.dtype)


def gradients(ctx, needs, dy, dtotal):
    """(dx, dweight, dbias, dresidual), None for those that are not needed. dtotal: of the sum as a result."""
    kind, offset, x_dtype, bias_dtype, residual_dtype = ctx.facts
    need_x, need_weight, need_bias, need_residual = needs
    if dy is None:  # only the sum was used
        return (dtotal.to(x_dtype) if need_x else None, None, None,
                dtotal.to(residual_dtype) if need_residual else None)
    # x and residual have one gradient; it is written a second time only for a second type
    other = residual_dtype if need_x and need_residual and residual_dtype != x_dtype else None
    h, weight, rstd, mean = ctx.saved_tensors
    dx, dweight, dbias, dresidual = _norm_backward(
        kind, dy, h, weight, rstd, mean if kind == "layernorm" else None, dresidual_out=dtotal,
        weight_offset=offset, needs=(need_x or need_residual, need_weight, need_bias),
        dx_dtype=x_dtype if need_x else residual_dtype, dresidual_dtype=other)
    if other is None:
        dresidual = dx
    return (dx if need_x else None, dweight, None if dbias is None else dbias.to(bias_dtype),
            dresidual if need_residual else None)


def _norm_backward(kind, dy, x, weight, rstd, mean, *, dresidual_out, **options):
    """`reference_norms.norm_backward`, by a kernel where the tensors are on a GPU."""
    if not dy.is_cuda:
        return reference_norms.norm_backward(kind, dy, x, weight, rstd, mean, dresidual_out=dresidual_out, **options)
    kept = 1 if weight is None else weight.dim()
    dy, x_rows, dresidual_out = (_rows(t, kept) for t in (dy, x, dresidual_out))
    if kept == 2:
        from .heads_ops import heads_backward as kernel
    else:
        from .backward_ops import norm_backward as kernel
    dx, dweight, dbias, dresidual = kernel(kind, dy, x_rows, weight, rstd, mean, dresidual_out=dresidual_out, **options)
    if x_rows is x:
        return dx, dweight, dbias, dresidual
    return (None if dx is None else dx.view(x.shape), dweight, dbias,
            None if dresidual is None else dresidual.view(x.shape))


def _rows(t, kept):
    """As (M, N), or (R, H, N) with kept = 2; the last dimension contiguous. Copies only what cannot be read so."""
    if t is None:
        return None
    if t.stride(-1) != 1 and t.shape[-1] > 1:  # a sum's gradient, for example: one element, seen everywhere
        t = t.contiguous()
    return t if t.dim() == kept + 1 else t.reshape(-1, *t.shape[-kept:])
