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


def over_shared(of_heads: Tensor, x: Tensor) -> Tensor:
    """(B, S, H, K), of x's dtype: `of_heads` summed over the heads that share one of x's, in float32 (float64 of
    float64) and rounded once. of_heads: (B, S, HO, K), of x's dtype or of float32, HO a multiple of H; others than
    contiguous ones are copied. What is the sum already is returned as it is."""
    if of_heads.shape == x.shape and of_heads.dtype == x.dtype:
        return of_heads
    return sum_rounded(of_heads.unflatten(2, (x.shape[2], -1)), x.dtype)


def sum_rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(.., K): x (.., n, K), of dtype or float32, summed over the last but one dimension in float32 (float64 of
    float64) and rounded once; others than contiguous ones are copied."""
    *rows, n, K = x.shape
    if not (x.is_cuda and dtype in NARROW):
        return x.to(torch.promote_types(x.dtype, torch.float32)).sum(-2).to(dtype)
    y = torch.empty(*rows, K, device=x.device, dtype=dtype)
    if y.numel():
        spec = HeadSumsSpec(dtypes.name_of(dtype), K, dtypes.name_of(x.dtype), at_once(n))
        _launcher(x, spec)(x.reshape(-1, n, K).contiguous(), y.view(-1, K))
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
