"""Sums over shared heads and dot products of rows, of torch tensors."""
from __future__ import annotations

import torch
from torch import Tensor

from tkq.linear_attention.finish.spec import HeadSumsSpec, RowDotsSpec, at_once, lanes
from tkq.runtime import Recipe, function
from tkq.runtime.call import dtypes
from tkq.runtime.device import arch

NARROW = torch.bfloat16, torch.float16
_launchers: dict = {}  # (device, spec) -> the kernel's function


def recipe(spec: HeadSumsSpec | RowDotsSpec) -> Recipe:
    """The kernel's."""
    kernel = "heads:HeadSums" if isinstance(spec, HeadSumsSpec) else "rows:RowDots"
    return Recipe(f"tkq.linear_attention.finish.{kernel}", (spec,))


def over_shared(terms, x: Tensor) -> Tensor:
    """(B, S, H, K), of x's dtype: terms[0] (- terms[1] - terms[2]), summed over the heads that share one of x's, in
    float32 (float64 of float64) and rounded once. terms: one to three of (B, S, HO, K), of x's dtype or of float32, HO
    a multiple of H; others than contiguous ones are copied. One that is all of it already is returned as it is."""
    first, *rest = terms
    if not rest and first.shape == x.shape and first.dtype == x.dtype:
        return first
    (B, S, H, K), heads = x.shape, first.shape[2]
    if not (x.is_cuda and x.dtype in NARROW):
        wide = [term.to(torch.promote_types(term.dtype, torch.float32)) for term in terms]
        return sum((-term for term in wide[1:]), wide[0]).unflatten(2, (H, -1)).sum(3).to(x.dtype)
    y = torch.empty(B, S, H, K, device=x.device, dtype=x.dtype)
    if y.numel():
        spec = HeadSumsSpec(dtypes.name_of(x.dtype), K, len(terms), dtypes.name_of(first.dtype),
                            at_once(heads // H, len(terms)))
        terms = [term.reshape(-1, heads // H, K) for term in terms]
        _launcher(x, spec)(*terms, *(None,) * (3 - len(terms)), y.view(-1, K))
    return y


def row_dots(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a's and b's dot products over the last dimension, (B, S, HO), in float32 (float64 of float64), rounded to dtype.
    a, b: (B, S, HO, V), of one dtype; others than contiguous ones are copied."""
    if not (a.is_cuda and a.dtype in NARROW):
        wide = torch.promote_types(a.dtype, torch.float32)
        return (a.to(wide) * b.to(wide)).sum(-1).to(dtype)
    y = torch.empty(a.shape[:-1], device=a.device, dtype=dtype)
    if y.numel():
        V = a.shape[-1]
        spec = RowDotsSpec(dtypes.name_of(a.dtype), V, dtypes.name_of(dtype), lanes(V))
        _launcher(a, spec)(a.reshape(-1, V), b.reshape(-1, V), y.view(-1))
    return y


def _launcher(x, spec):
    key = x.get_device(), spec
    if key not in _launchers:
        arch.require_hopper(x.device)
        _launchers[key] = function(recipe(spec))
    return _launchers[key]
