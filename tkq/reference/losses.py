"""Softmax and the losses in plain PyTorch, forward and backward: what the ops mean, as tkq.reference has it for others.

Computed in float32 (float64 stays float64), rounded once at the end.
"""
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..runtime.call import autocast
from .precision import _upcast


def softmax(x: Tensor, scale: float = 1.0, log: bool = False) -> Tensor:
    """softmax(scale * x) over the last dimension, or its logarithm."""
    z = _upcast(x) * scale
    return (torch.log_softmax(z, -1) if log else torch.softmax(z, -1)).to(x.dtype)


def softmax_backward(y: Tensor, dy: Tensor, scale: float = 1.0, log: bool = False) -> Tensor:
    """The gradient of x, from the output and its gradient."""
    w, g = _upcast(y), _upcast(dy)
    dx = g - w.exp() * g.sum(-1, keepdim=True) if log else w * (g - (g * w).sum(-1, keepdim=True))
    return (dx * scale).to(y.dtype)


# ---- cross entropy --------------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """What cross entropy asks beside logits and target: see ``tkq.cross_entropy``."""

    weight: Optional[Tensor] = None
    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0  # 0: none


def _capped(x, terms):
    z = _upcast(x)
    return terms.softcap * torch.tanh(z / terms.softcap) if terms.softcap else z


def _class_weights(z, terms):
    if terms.weight is not None:
        return terms.weight.to(z.dtype)
    return torch.ones(z.shape[-1], dtype=z.dtype, device=z.device)


def _targets(z, target, terms):
    """(class or 0, its weight, is the row ignored, is its target a class)."""
    target = target.long()  # or an ignore_index beyond 32 bits would wrap around, perhaps to a class
    known = (target >= 0) & (target < z.shape[-1])
    index = torch.where(known, target, 0)
    return index, _class_weights(z, terms)[index], target == terms.ignore_index, known


NO_TERMS = Terms()


def row_weights(z: Tensor, target: Tensor, terms: Terms) -> Tensor:
    """What each row counts for in a mean."""
    _, hit, ignored, known = _targets(z, target, terms)
    if terms.weight is not None:
        hit = hit.masked_fill(~known, torch.nan)
    return hit.masked_fill(ignored, 0.0)


def cross_entropy_rows(logits: Tensor, target: Tensor, terms: Terms) -> Tensor:
    """The loss of each row of logits (M, N): 0 where the target is ignored, NaN where it is no class."""
    z = _capped(logits, terms)
    index, hit, ignored, known = _targets(z, target, terms)
    log_p = torch.log_softmax(z, -1)
    loss = -hit * log_p.gather(-1, index[:, None])[:, 0]
    if terms.label_smoothing:
        smoothing_loss = -(log_p * _class_weights(z, terms)).sum(-1)
        loss = loss * (1 - terms.label_smoothing) + smoothing_loss * (terms.label_smoothing / z.shape[-1])
    if terms.z_loss:
        loss = loss + terms.z_loss * z.logsumexp(-1).square()
    return loss.masked_fill(~known, torch.nan).masked_fill(ignored, 0.0)


def cross_entropy(logits: Tensor, target: Tensor, terms: Terms = NO_TERMS) -> Tensor:
    """The loss of logits (..., N), reduced, in float32 (float64 stays float64)."""
    rows, index = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    losses = cross_entropy_rows(rows, index, terms)
    if terms.reduction == "none":
        return losses.view(target.shape)
    if terms.reduction == "sum":
        return losses.sum()
    return losses.sum() / row_weights(losses.new_empty(1, rows.shape[-1]), index, terms).sum()


def cross_entropy_backward(logits: Tensor, target: Tensor, dloss: Tensor, terms: Terms = NO_TERMS) -> Tensor:
    """The gradient of logits: 0 in rows that are ignored, whatever they hold."""
    shape = logits.shape
    logits, target = logits.reshape(-1, shape[-1]), target.reshape(-1)
    z = _capped(logits, terms)
    index, hit, ignored, known = _targets(z, target, terms)
    w, e = _class_weights(z, terms), terms.label_smoothing
    scale = dloss.to(z.dtype).reshape(-1, 1)
    if terms.reduction == "mean":
        scale = scale / row_weights(z, target, terms).sum()
    p, hit = torch.softmax(z, -1), hit[:, None] * (1 - e)
    d = p * (hit + e / shape[-1] * w.sum()) - e / shape[-1] * w
    d = d - hit * (torch.arange(shape[-1], device=z.device) == index[:, None])
    if terms.z_loss:
        d = d + 2 * terms.z_loss * z.logsumexp(-1, keepdim=True) * p
    if terms.softcap:
        d = d * (1 - (z / terms.softcap).square())
    d = (d * scale).masked_fill(~known[:, None], torch.nan).masked_fill(ignored[:, None], 0.0)
    return d.to(logits.dtype).view(shape)


@autocast.apart
def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, terms: Terms = NO_TERMS) -> Tensor:
    """The loss of the logits x @ weight.T, which are rounded to x's type."""
    logits = (_upcast(x) @ _upcast(weight).t()).to(x.dtype)
    return cross_entropy(logits, target, terms)


@autocast.apart
def linear_cross_entropy_backward(x: Tensor, weight: Tensor, target: Tensor, dloss: Tensor, terms: Terms = NO_TERMS,
                                  of_weight: Optional[torch.dtype] = None) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight; that of the logits is rounded to x's type. of_weight: the type of the latter,
    weight's where not given."""
    rows = x.reshape(-1, x.shape[-1])
    logits = (_upcast(rows) @ _upcast(weight).t()).to(x.dtype)
    dlogits = _upcast(cross_entropy_backward(logits, target.reshape(-1), dloss, terms))
    dx, dweight = dlogits @ _upcast(weight), dlogits.t() @ _upcast(rows)
    return dx.to(x.dtype).view(x.shape), dweight.to(of_weight or weight.dtype)
