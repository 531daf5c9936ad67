"""The cross entropy of a linear layer, chunk by chunk of rows: the launches.

    for each chunk of rows:   z = x @ weight.T;  losses and, over z, dz;  dx = dz @ weight;  dweight += dz.T @ x

One buffer holds a chunk's z and then dz; neither the logits nor their gradient are ever whole in memory.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from ..gemm.dense.ops import run as gemm
from ..reference.losses import Terms
from . import launch
from .plan import chunk_rows, padded


class Layer(NamedTuple):
    """x: (M, K); weight: (V, K), both with contiguous rows; target: (M,)."""

    x: Tensor
    weight: Tensor
    target: Tensor


class Outcome(NamedTuple):
    """saved, all: see `class_rows.Saved`. dx, dweight: the gradients, empty where none was asked for; to be multiplied
    by `gradient_factor`."""

    loss: Tensor
    saved: Tensor
    all: Tensor
    dx: Tensor
    dweight: Tensor


def forward(layer: Layer, terms: Terms, grad_x: bool, grad_weight: bool) -> Outcome:
    """The loss. For a mean or a sum, the gradients that are asked for come with it."""
    x, target = layer.x, layer.target
    M, each = x.shape[0], terms.reduction == "none"
    like = dict(dtype=torch.float32, device=x.device)
    losses, saved, all = torch.empty(M, **like), torch.empty(2 * M, **like), torch.ones(2, **like)
    fused = (grad_x or grad_weight) and not each
    dx, dweight = _gradients(layer, fused and grad_x, fused and grad_weight)
    loss = losses if each else torch.empty((), **like)
    if not M:
        return Outcome(loss if each else loss.fill_(0.0 if terms.reduction == "sum" else torch.nan), saved, all, dx,
                       dweight.zero_())
    if fused and (folds(terms, x) or (terms.weight is not None and terms.reduction == "mean")):
        launch.total(None, target, terms, None, all)
        if not folds(terms, x):  # 1, or what makes NaN of every row that counts, and leaves the ignored ones 0
            all.masked_fill_(all.isfinite(), 1.0)
    for part, z in _chunks(layer):
        launch.part_forward(z, target[part], terms, losses[part], saved[2 * part.start:2 * part.stop], all,
                            z if fused else None)
        if fused:
            _add(layer, part, z, dx, dweight)
    if not each:
        launch.total(losses, target, terms, loss, all)
    return Outcome(loss, saved, all, dx, dweight)


def backward(layer: Layer, terms: Terms, dloss: Tensor, saved: Tensor, all: Tensor, grad_x: bool,
             grad_weight: bool) -> tuple:
    """(dx, dweight), with each chunk's logits recomputed. dloss: (M,), or () where the loss was reduced."""
    dx, dweight = _gradients(layer, grad_x, grad_weight)
    each = terms.reduction == "none"
    if not layer.x.shape[0]:
        return dx, dweight.zero_()
    for part, z in _chunks(layer):
        launch.part_backward(z, layer.target[part], terms, dloss[part] if each else dloss,
                             saved[2 * part.start:2 * part.stop], all)
        _add(layer, part, z, dx, dweight)
    return dx, dweight.to(layer.weight.dtype)


def folds(terms: Terms, x: Tensor) -> bool:
    """Is a mean's division part of the gradients that a forward computes? fp16 could not hold them: 1e-8 of a
    probability of 1e-4 among 1e4 rows is nothing there. So those stay undivided, and the division comes last."""
    return terms.reduction == "mean" and x.dtype != torch.float16


def gradient_factor(terms: Terms, x: Tensor, dloss: Tensor, all: Tensor) -> Tensor:
    """What the gradients of a forward have to be multiplied by. Where the weights' sum is 0, or NaN, they are what they
    are to be: 0 in rows that are ignored, which 0 * inf would not leave."""
    if terms.reduction != "mean" or folds(terms, x):
        return dloss
    return dloss * all[0].nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)


def times(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor in float32 or wider, rounded to dtype, and 0 where x is 0: as ``backward.Scale``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(x == 0, wide, wide * factor).to(dtype)


def _gradients(layer, of_x, of_weight):
    """Memory for them. fp16 sums over all rows undivided gradients: in fp32, which they do not leave."""
    x, weight, _ = layer
    kind = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if of_x else x.new_empty(0)
    return dx, torch.empty(weight.shape, dtype=kind, device=x.device) if of_weight else x.new_empty(0, dtype=kind)


def _chunks(layer):
    """(rows, their logits), one after the other in the same memory."""
    x, weight, _ = layer
    M, V = x.shape[0], weight.shape[0]
    rows, pitch = chunk_rows(M, V, x.element_size()), padded(V, x.element_size())
    memory = torch.empty((min(rows, M), pitch), dtype=x.dtype, device=x.device)
    memory[:, V:].zero_()  # dz @ weight reads it
    for first in range(0, M, rows):
        part = slice(first, min(first + rows, M))
        z = memory[:part.stop - first, :V]
        gemm(x[part], weight.t(), z, writable_padding=True)
        yield part, z


def _add(layer, part, dz, dx, dweight):
    """This chunk's rows of dx; its part of dweight."""
    if dx.numel():
        gemm(dz, layer.weight, dx[part])
    if dweight.numel():
        gemm(dz.t(), layer.x[part], dweight, accumulate=part.start > 0)
