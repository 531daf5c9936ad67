"""The norms' gradients as autograd asks for them: what is kept, and which kernel computes them."""
from typing import NamedTuple, Optional

import torch

from .. import reference_norms


class Facts(NamedTuple):
    """What backward needs to know beside the kept tensors. Types: None where there is no such input."""

    kind: str
    offset: float
    x: torch.dtype
    bias: Optional[torch.dtype]
    residual: Optional[torch.dtype]


def remember(ctx, kind, offset, x, weight, bias, residual, found) -> None:
    """Keep what `gradients` needs: what was normalised, weight, rstd and mean."""
    h = x if residual is None else found.total
    ctx.save_for_backward(h, weight, found.rstd, found.mean)
    ctx.facts = Facts(kind, offset, x.dtype, None if bias is None else bias.dtype,
                      None if residual is None else residual.dtype)
    ctx.set_materialize_grads(False)


def gradients(ctx, dy, dtotal):
    """(dx, dweight, dbias, dresidual), None for an input that needs none. dtotal: of the sum as a result.

    ctx: of a function whose inputs begin with x, weight, bias, eps, residual."""
    facts = ctx.facts
    need_x, need_weight, need_bias, _, need_residual = ctx.needs_input_grad[:5]
    if dy is None:  # only the sum was used
        return (dtotal.to(facts.x) if need_x else None, None, None,
                dtotal.to(facts.residual) if need_residual else None)
    # x and residual have one gradient; it is written a second time only for a second type
    other = facts.residual if need_x and need_residual and facts.residual != facts.x else None
    h, weight, rstd, mean = ctx.saved_tensors
    dx, dweight, dbias, dresidual = _norm_backward(
        facts.kind, dy, h, weight, rstd, mean if facts.kind == "layernorm" else None, dresidual_out=dtotal,
        weight_offset=facts.offset, needs=(need_x or need_residual, need_weight, need_bias),
        dx_dtype=facts.x if need_x else facts.residual, dresidual_dtype=other)
    if other is None:
        dresidual = dx
    return (dx if need_x else None, dweight, None if dbias is None else dbias.to(facts.bias),
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
