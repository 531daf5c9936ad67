"""Sums from each token to the last, and products of states that they end with, of torch tensors."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tkq.linear_attention.launch import Made, Steps
from tkq.linear_attention.packed_sequences import token_sequences
from tkq.linear_attention.spec import ProductsSpec, StepSpec, SuffixSpec
from tkq.linear_attention.suffix.plan import segment_count
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

_launchers: dict = {}  # (device, what a spec has) -> the kernel's function


def recipe(spec: SuffixSpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.suffix.kernel:SuffixSums", (spec,))


def products_recipe(spec: ProductsSpec) -> Recipe:
    """The kernel's."""
    return Recipe("tkq.linear_attention.suffix.products:StateProducts", (spec,))


def suffix_sums(x: Tensor, less: Tensor | None = None, end: Tensor | None = None, cu: Tensor | None = None) -> Tensor:
    """(B, S, H): of each token the sum of x - less over it and those behind it, and end (B, H). x and less are
    (B, S, H), or (P, B, S, H), of parts whose sums are meant. cu: (N + 1,), where packed sequences begin and end, as
    `edges` has it: sums end with a sequence, end is (N, H); tokens of no sequence have 0, whatever is there.

    float32 on a GPU: in float64 within, by two launches, in an order that sizes alone decide. (torch.cumsum adds in one
    that varies where B and H are 1, and is refused or takes S^2 memory where deterministic algorithms are asked for.)
    Others by torch.cumsum, in their own type."""
    if x.is_cuda and x.dtype == torch.float32:
        return _launched(_in_parts(x), _in_parts(less), end, cu)
    x, less = (y if y is None or y.dim() == 3 else y.sum(0) for y in (x, less))
    if less is not None:
        x = x - less
    if cu is not None:
        of = token_sequences(cu, x.shape[1])
        y = of.suffix_sums(x)
        return y if end is None else y + of.of_tokens(end)
    y = x.flip(1).cumsum(1).flip(1)
    return y if end is None else y + end[:, None]


class StepGradients(NamedTuple):
    """What Mamba-2's step sizes get: ddt (B, S, H), of dt's dtype; dA and dbias (H,), of A's and bias's; dbias None
    without a bias."""

    ddt: Tensor
    dA: Tensor
    dbias: Tensor | None


def step_gradients(of_c: Made, of_x: Made, steps: Steps, end: Tensor | None = None,
                   cu: Tensor | None = None) -> StepGradients:
    """What `suffix.steps.StepSizes` computes, by the launches of `suffix_sums`.

    of_c, of_x: what gave dC and dx, with their sums and diagonals. end, cu: as `suffix_sums` has them. Of float32 sums
    on a GPU, of one token at least."""
    dt, A, bias, softplus, low, high, *_ = steps
    x, less, ddt = _in_parts(of_c.dots), _in_parts(of_x.dots), dt.new_empty(dt.shape)
    spec = StepSpec(dtypes.name_of(dt.dtype), None if bias is None else dtypes.name_of(bias.dtype), softplus)
    totals = _room(x, cu)
    sums = totals.new_empty(2, *totals.shape)
    _launch(x, (less, end, totals, None, cu, (dt, A, bias, low, high, of_c.diagonal, of_x.diagonal, ddt, sums)), spec)
    dA, dbias = sums.sum((1, 2)).unbind(0)
    return StepGradients(ddt, dA.to(A.dtype), None if bias is None else dbias.to(bias.dtype))


def state_products(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """(R, H): scale times the sum of x times y, over V and K, of states (R, H, V, K), with K contiguous.

    float32 on a GPU: by one launch, in an order that V and K alone decide. Others by torch, in their own type."""
    if not (x.is_cuda and x.dtype == torch.float32):
        return scale * (x * y).sum((-1, -2))
    found, spec = x.new_empty(x.shape[:2]), ProductsSpec(x.shape[3])
    key = x.get_device(), spec
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(products_recipe(spec))
    if found.numel():
        _launchers[key](x, y, found, scale)
    return found


def _in_parts(x):
    return x if x is None or x.dim() == 4 else x[None]


def _launched(x, less, end, cu):
    y = x.new_empty(x.shape[1:])
    if y.numel():
        _launch(x, (less, end, _room(x, cu), y, cu, None))
    return y


def _room(x, cu):
    """For the totals of segments."""
    _, B, S, H = x.shape
    rows, count = (B, segment_count(S)) if cu is None else (len(cu) + 1, segment_count(S, len(cu) - 1))
    return torch.empty(rows, count, H, device=x.device, dtype=torch.float64)


def _launch(x, others, steps=None):
    """others: as `suffix.kernel.Given` has them behind x. steps: a `StepSpec`, or None."""
    less, end, totals, y, cu, of_steps = others
    end = end if end is None or len(end) else None  # of no sequences
    packed = None if cu is None else dtypes.name_of(cu.dtype)
    key = x.get_device(), len(x), 0 if less is None else len(less), end is not None, packed, steps
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(recipe(SuffixSpec(*key[1:])))
    _launchers[key](x, (less, end, totals, y, cu, of_steps))
